"""Runs work in a forked process, which a crash or a hang ends alone."""

import multiprocessing
import os


class Died(Exception):
    """The process ended without a result, or did not end."""


def _send(sender, work, arguments):
    nothing = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nothing, output)
    sender.send(work(*arguments))


def isolated(work, *arguments, limit):
    """What work(*arguments) returns. limit: seconds. Raises Died. What it prints is dropped."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise Died(f"no answer in {limit} s")
        return receiver.recv()
    except EOFError:
        process.join()
        raise Died(f"the process ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
