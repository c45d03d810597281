"""Rules of CONTRIBUTING.md that no linter covers, checked on the syntax trees."""

import ast
import functools
import itertools
import pathlib
import re
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LIBRARY = [
    path
    for folder in ("tilewright", "lab/tilewright_lab", "bench", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
KERNELS = sorted((ROOT / "tilewright/kernels").rglob("*_triton.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


@functools.cache
def parsed(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return tree_of(path.read_text(), ".".join(parts).removeprefix("lab."))


def tree_of(text, module="tilewright.bench.planted"):
    """Its syntax tree, with the module's name."""
    tree = ast.parse(text)
    tree.module, tree.lines = module.removesuffix(".__init__"), text.splitlines()
    return tree


def dotted(node):
    """`a.b.c` as text; the last names of any other expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def swallowed(tree):
    """A caught and discarded exception: the reason for a missing package is lost."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.dump(node.type) if node.type else "everything"
            empty = all(
                isinstance(s, ast.Pass | ast.Continue)
                or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in node.body
            )
            broad = ("ImportError", "ModuleNotFoundError", "'Exception'", "everything")
            if empty and any(name in caught for name in broad):
                yield node.lineno, "an exception is caught and forgotten"
        if (
            isinstance(node, ast.Call)
            and dotted(node.func).endswith("suppress")
            and any(
                dotted(a) in ("ImportError", "ModuleNotFoundError", "Exception") for a in node.args
            )
        ):
            yield node.lineno, "an exception is suppressed and forgotten"


def environment(tree):
    """Only platform.py reads environment variables, so that one place lists all that can change a
    run.
    """
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if name in ("os.environ", "os.getenv", "os.putenv"):
            yield node.lineno, f"{name} outside platform.py"
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {"environ", "getenv"} & {a.name for a in node.names}
        ):
            yield node.lineno, "os.environ outside platform.py"


def generated(tree):
    """Code generated from strings cannot be found by reading."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("exec", "eval"):
            yield node.lineno, f"{dotted(node.func)}()"


def patched(tree):
    """A module that modifies another one on import."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                root = dotted(target).split(".")[0]
                if isinstance(target, ast.Attribute) and root in imported(tree):
                    yield node.lineno, f"{dotted(target)} is assigned on import"
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and dotted(node.value.func)
            in (
                "setattr",
                "torch.manual_seed",
                "torch.set_default_dtype",
                "torch.set_num_threads",
                "warnings.filterwarnings",
                "warnings.simplefilter",
            )
        ):
            yield node.lineno, f"{dotted(node.value.func)}() on import"


def imported(tree):
    return {
        (a.asname or a.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for a in node.names
    }


UNPORTABLE = ("autotune", "libdevice", "inline_asm_elementwise")


def unportable(tree):
    """Code that Triton's interpreter cannot run, or that searches for a configuration during
    training. Inline PTX may be the body of `if HARDWARE:`, with the software equivalent in its
    `else`.
    """
    apart = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test) == "HARDWARE" and node.orelse
        for statement in node.body
        for inner in ast.walk(statement)
        if dotted(inner).endswith("inline_asm_elementwise")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in UNPORTABLE and node not in apart:
            yield node.lineno, f"{dotted(node)} in a Triton kernel"
        if isinstance(node, ast.ImportFrom) and "libdevice" in [a.name for a in node.names]:
            yield node.lineno, "libdevice in a Triton kernel"


def unlaunched(tree):
    """A kernel that is not launched through `launch`, which chooses what Triton's versions choose
    differently.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Subscript) and not dotted(node.func.value).startswith("tl"))
            or (isinstance(node.func, ast.Attribute) and node.func.attr in ("warmup", "run"))
        ):
            yield node.lineno, f"{ast.unparse(node.func)}(...) in place of launch"


def undocumented(tree):
    """Only core/torch_names.py may use undocumented PyTorch APIs."""
    torches = {"torch"} | {
        a.asname or a.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for a in node.names
    }
    for node in ast.walk(tree):
        names, root = [], ""
        if isinstance(node, ast.Attribute):
            root, *names = dotted(node).split(".")
            if root not in torches or names[0] == "ops":
                names = (
                    [node.attr]
                    if node.attr in ("_is_view", "_base", "_dynamo_marked_constant")
                    else []
                )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [
                n
                for a in node.names
                for n in f"{module + '.' if module else ''}{a.name}".split(".")
            ]
            names = names if names[0] == "torch" else []
        if any(n.startswith("_") and not n.startswith("__") for n in names):
            yield node.lineno, f"{'.'.join([root, *names])} outside torch_names.py"


MOST_PARAMETERS = 10
MOST_LINES = 60


def public(tree):
    """Functions that users call with keywords: names of an `__all__`, constructors, and modules;
    and other libraries' ops, which are called with the same.
    """
    yield from (name for module, name in all_exported() if module == tree.module)
    if tree.module.startswith("tilewright.bench.peers_"):
        yield from (name for _, name in all_exported())
    yield "attention_forward"  # transformers calls it with its own arguments
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from (f"{node.name}.{n}" for n in ("__init__", "forward"))


def exported(path):
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == "__all__":
            yield from ast.literal_eval(node.value)


@functools.cache
def all_exported():
    """(module, name) of what an `__all__` lists, with the module that it is imported from."""
    found = set()
    for path in LIBRARY:
        tree, names = parsed(path), set(exported(path))
        found |= {(tree.module, name) for name in names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                found |= {(node.module, a.name) for a in node.names if a.name in names}
    return found


def functions_of(body, prefix=""):
    """Functions with their names, methods as `Class.method`; nested ones by their own names."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        inner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        yield from functions_of(ast.iter_child_nodes(node), inner)


def device_code(node):
    """Whether a function is a kernel, or inlined in one: of Triton, or of CuTe DSL."""
    said = [ast.unparse(d) for d in node.decorator_list]
    return any("jit" in d or d == "cute.kernel" for d in said)


def said_above(tree, node, word):
    """Whether a comment above a function says `# word: ...`."""
    begin = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    above = itertools.takewhile(
        lambda line: line.lstrip().startswith("#"), reversed(tree.lines[: begin - 1])
    )
    return any(line.lstrip().startswith(f"# {word}: ") for line in above)


def crowded(tree):
    """Options that belong together are one value. A public signature may have more of them, for a
    reason in a comment above it, `# Wide: ...`. Exempt are kernels.
    """
    allowed = set(public(tree))
    for name, node in functions_of(tree.body):
        if device_code(node) or (name in allowed and said_above(tree, node, "Wide")):
            continue
        a = node.args
        count = len([p for p in (*a.posonlyargs, *a.args) if p.arg not in ("self", "cls")])
        count += len(a.kwonlyargs)
        if count > MOST_PARAMETERS:
            yield node.lineno, f"{name} has {count} parameters"
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
            if count > MOST_PARAMETERS:
                yield node.lineno, f"a lambda has {count} parameters"


def long(tree):
    """A function of more than MOST_LINES lines, its docstring aside, has the reason above it, in a
    comment `# Long: ...`. Exempt are kernels.
    """
    for name, node in functions_of(tree.body):
        if device_code(node):
            continue
        first = node.body[0]
        described = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        about = first.end_lineno - first.lineno + 1 if described else 0
        lines = node.end_lineno - node.lineno + 1 - about
        if lines > MOST_LINES and not said_above(tree, node, "Long"):
            yield node.lineno, f"{name} has {lines} lines"


def private(tree):
    """A name with a leading underscore is private to its module, a module `_name` to its
    package. A subclass may use what it inherits.
    """
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
            node.level or (node.module or "").startswith(("tilewright", "bench"))
        ):
            for a in node.names:
                if is_module(node.module, a.name):
                    modules.add(a.asname or a.name)
                elif underscored(a.name):
                    yield node.lineno, f"{a.name} of {node.module} is imported"
    others = every_private_name() - set(private_names(tree)) - FOREIGN
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and underscored(node.attr):
            root, *names = dotted(node).split(".")
            inherited = root in ("self", "cls") and len(names) == 1
            foreign = root in ("torch", "_C") or is_module(root, *names)
            if root in modules or (node.attr in others and not inherited and not foreign):
                yield node.lineno, f"{ast.unparse(node)} is used"


# Names that other libraries give their objects, though a module here has one of the same name.
FOREIGN = {
    "_replace",
    "_parameters",
    "_modules",
    "_indices",
    "_tokenizer",
    "_apply_gate",
    "_processes",
    "_spec",
}


def underscored(name):
    return name.startswith("_") and not name.startswith("__")


def is_module(*names):
    parts = ".".join(filter(None, names)).split(".")
    paths = [root.joinpath(*parts) for root in (ROOT, ROOT / "lab")]
    return any(path.with_suffix(".py").exists() or path.is_dir() for path in paths)


def private_names(tree):
    """Names with a leading underscore that a module defines or assigns."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if underscored(name):
            yield name


@functools.cache
def every_private_name():
    return {name for path in LIBRARY for name in private_names(parsed(path))}


def positional(tree):
    """A Request is built with keywords: it has many fields, mostly flags."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and dotted(node.func).split(".")[-1] == "Request"
            and node.args
        ):
            yield node.lineno, "a Request is built by position"


def retried(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("flaky", "reruns"):
            yield node.lineno, "a test is retried"


CLOCKS = (
    r"\b(((perf_counter|monotonic|process_time|thread_time|time\.time)(_ns)?)|datetime\.(utc)?now"
    r"|elapsed_time|do_bench|timeit)"
)
# Who sleeps for minutes stands for what never ends.
SLEEP = r"\bsleep\((?!\d{3,}\))"


def clocked(tree):
    """A test whose verdict may depend on how fast a machine is, as it reads a clock or sleeps. It
    counts, waits for an event (`helpers.until`) or passes a clock of its own to what reads one.
    """
    for node in ast.walk(tree):
        found = None
        if isinstance(node, ast.Attribute | ast.Name):
            found = re.search(f"{CLOCKS}$", dotted(node))
        elif isinstance(node, ast.ImportFrom):
            names = " ".join(f"{node.module}.{a.name}" for a in node.names)
            found = re.search(rf"{CLOCKS}\b", names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("sleep"):
            found = re.search(SLEEP, ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a script's
            found = re.search(rf"{CLOCKS}\(|{SLEEP}", node.value)
        if found:
            yield node.lineno, f"{found[0]} in a test"


# Files of tests that may, and why.
MAY_SLEEP = {
    "helpers.py": "`pause`, between two looks at another process, which are counted",
    "forked.py": "the same, of processes that are waited for; helpers.py is imported in them",
    "test_style.py": "faults that are planted, in strings",
    "compiled.py": "its command says how long runs took",
    "__main__.py": "of tests/mutations: its command says how long tests took",
    "watched.py": "the limit of that command; no test runs it with one",
}


def hoarding(tree):
    """functools.cache must cache loaded modules."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(dotted(target) == "_loaded" for target in targets if target is not None):
            yield node.lineno, "_loaded: use functools.cache"


# Where pickles are read: the module, what is at its top level there, and why.
MAY_UNPICKLE = {
    (
        "tilewright.trainer.checkpoint.checkpoint_files",
        "import pickle",
    ): "the reader of DCP's metadata, which allows only listed types",
    (
        "tilewright.trainer.checkpoint.checkpoint_files",
        "Planner",
    ): "DCP's own planner takes pickled objects "
    "that are not tensors; they are read with a list of allowed types before",
}
OBJECTS = r"(all_gather|broadcast|gather|recv|scatter|send)_object(_list)?"
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}


def pickled(tree):
    """A pickle is code that who reads it runs: ranks exchange tensors and JSON (`exchange.py`), and
    files are safetensors and JSON.
    """
    for statement in tree.body:
        at = getattr(statement, "name", ast.unparse(statement).partition("\n")[0])
        if (tree.module, at) in MAY_UNPICKLE:
            continue
        for node in ast.walk(statement):
            name = dotted(node).split(".")[-1] if isinstance(node, ast.Attribute | ast.Name) else ""
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                if wrong := {n for n in names if n and n.split(".")[0] in PICKLERS}:
                    yield node.lineno, f"{wrong.pop()} is imported"
                if getattr(node, "module", None) == "torch" and "load" in names:
                    yield node.lineno, "torch.load"
                if any(re.fullmatch(OBJECTS, n or "") for n in names):
                    yield node.lineno, "objects are exchanged"
            elif re.fullmatch(OBJECTS, name):
                yield node.lineno, f"{name} pickles what it sends"
            elif dotted(node) in ("torch.load", "torch.serialization.load"):
                yield node.lineno, "torch.load"
            elif dotted(node).startswith("pickle.load"):
                yield node.lineno, dotted(node)
            elif (
                isinstance(node, ast.keyword)
                and node.arg == "allow_pickle"
                and getattr(node.value, "value", True) is not False
            ):
                yield node.value.lineno, "allow_pickle"


def test_each_place_that_reads_pickles_is_there():
    for module, name in MAY_UNPICKLE:
        tree = parsed(ROOT.joinpath(*module.split(".")).with_suffix(".py"))
        tree.module = "another"
        assert [*pickled(tree)], name
        tree.module = module


RULES = [
    (pickled, LIBRARY),
    (hoarding, LIBRARY),
    (crowded, LIBRARY),
    (long, LIBRARY),
    (private, LIBRARY),
    (positional, LIBRARY + TESTS),
    (swallowed, LIBRARY),
    (environment, [p for p in LIBRARY if p.name != "platform.py"]),
    # The checks that a declaration of arguments stands for, and what a formula keeps of the names
    # of its parameters; tracebacks show their lines.
    (generated, [p for p in LIBRARY if p.name not in ("takes.py", "formula.py")]),
    (patched, LIBRARY),
    (unportable, KERNELS),
    (unlaunched, [*KERNELS, *sorted((ROOT / "tilewright/kernels").rglob("*_gluon.py"))]),
    (retried, TESTS),
    (clocked, [p for p in TESTS if p.name not in MAY_SLEEP]),
    (undocumented, [p for p in LIBRARY if p.name not in ("torch_names.py", "pretend.py")]),
]


# Functions, and classes with such a field, that have the whole configuration: they assemble a run,
# a plan of its memory, an evaluation or a teacher. These numbers only fall.
HAVE_ALL = {"build": 12, "evaluate": 3, "loop": 3, "memory_plan": 5, "teacher": 1}
TRAINER = ROOT / "tilewright/trainer"


def wholes(tree):
    """What has the whole configuration: a parameter or a field that is a Config, or called config
    without saying what it is.
    """
    for node in ast.walk(tree):
        named = getattr(node, "arg", getattr(getattr(node, "target", None), "id", None))
        if isinstance(node, ast.arg | ast.AnnAssign) and named is not None:
            said = ast.unparse(node.annotation) if node.annotation else ""
            if re.search(r"\bConfig\b", said):
                yield node.lineno, f"{named} is the whole configuration"
    for _, node in functions_of(tree.body):
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg) and arg.arg == "config" and arg.annotation is None:
                yield arg.lineno, "config is not said to be anything"


def test_a_function_takes_the_values_that_it_needs():
    found = {}
    for path in sorted(TRAINER.rglob("*.py")):
        module = ".".join(path.relative_to(TRAINER).with_suffix("").parts)
        if not module.startswith("config.") and (here := [*wholes(parsed(path))]):
            found[module] = here
    numbers = {module: len(here) for module, here in found.items()}
    assert numbers == HAVE_ALL, {
        m: here for m, here in found.items() if len(here) != HAVE_ALL.get(m)
    }


@pytest.mark.parametrize("rule, files", RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_rule_holds(rule, files):
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in files
        for line, what in rule(parsed(path))
    ]
    assert not found, "\n".join(found)


MANY = ", ".join(f"p{i}" for i in range(MOST_PARAMETERS + 1))


@pytest.mark.parametrize(
    "rule, source",
    [
        (wholes, "def f(config: Config): pass"),
        (wholes, "def f(x: int, *, c: config.Config | None = None): pass"),
        (wholes, "class A:\n    def f(self, config): pass"),
        (wholes, "class A:\n    config: Config"),
        (long, "def f():\n" + MOST_LINES * "    x = 1\n"),
        (long, "class A:\n    # Short: no.\n    def f(self):\n" + MOST_LINES * "        x = 1\n"),
        (crowded, f"def f({MANY}): pass"),
        (crowded, f"def f(a, *, {MANY}): pass"),
        (crowded, f"class A:\n    def f(self, {MANY}): pass"),
        (crowded, f"def f():\n    def g({MANY}): pass"),
        (crowded, f"def rmsnorm({MANY}): pass"),  # public in another module
        (crowded, f"def forward({MANY}): pass"),  # an operator's, of another room
        (crowded, f"# Wide: so.\ndef _f({MANY}): pass"),  # private
        (crowded, f"class A:\n    def forward(self, {MANY}): pass"),  # without a reason
        (private, "import tilewright.ops.norm.rmsnorm as r\nr._with_noise(x)"),
        (private, "import tilewright\ntilewright.ops.norm.rmsnorm._with_noise(x)"),
        (private, "from .rmsnorm import _with_noise"),
        (private, "OPS['rmsnorm']._table.clear()"),
        (private, "from tilewright.ops.norm import rmsnorm\n_fake = rmsnorm._fake"),
        (private, "def f(op):\n    return op._by_key"),
        (private, "from tilewright.ops.norm.rmsnorm import _fake"),
        (private, "from tilewright.ops.norm import rmsnorm\nrmsnorm._fake()"),
        (private, "from tilewright.core import checks\nchecks._cu_seqlens()"),
        (positional, "Request(64, True)"),
        (positional, "attention.Request(64)"),
        (swallowed, "try:\n    import triton\nexcept ImportError:\n    pass"),
        (swallowed, "try:\n    import triton\nexcept (OSError, ModuleNotFoundError):\n    ..."),
        (swallowed, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowed, "try:\n    f()\nexcept:\n    pass"),
        (swallowed, "with contextlib.suppress(ImportError):\n    import triton"),
        (environment, "import os\nx = os.environ.get('X')"),
        (environment, "import os\nx = os.getenv('X')"),
        (environment, "from os import environ"),
        (pickled, "import pickle"),
        (pickled, "from pickle import loads"),
        (pickled, "def f():\n    import dill"),
        (pickled, "class A:\n    def f(self):\n        return torch.load(file)"),
        (pickled, "from torch import load"),
        (pickled, "dist.all_gather_object(values, value, group=group)"),
        (pickled, "from torch.distributed import broadcast_object_list"),
        (pickled, "send_object_list([None])"),
        (pickled, "np.load(file, allow_pickle=True)"),
        (generated, "exec('x = 1')"),
        (patched, "import torch\ntorch.nn.Linear = None"),
        (patched, "import torch\ntorch.manual_seed(0)"),
        (patched, "from transformers import models\nmodels.llama.RMSNorm = None"),
        (unportable, "import triton\n@triton.autotune([], [])\ndef f(): pass"),
        (unportable, "from triton.language.extra import libdevice"),
        (unportable, "x = tl.inline_asm_elementwise('')"),
        (unportable, "if HARDWARE:\n    tl.inline_asm_elementwise('')"),
        (unportable, "if HARDWARE:\n    pass\nelse:\n    tl.inline_asm_elementwise('')"),
        (unlaunched, "_forward[(n,)](x, y, num_warps=4)"),
        (unlaunched, "_forward.warmup(x, grid=(1,))"),
        (unlaunched, "_forward.run(x, grid=(1,), warmup=False)"),
        (retried, "@pytest.mark.flaky(reruns=3)\ndef f(): pass"),
        (clocked, "import time\nassert time.perf_counter() - begun < 1"),
        (clocked, "import time as t\nbegun = t.monotonic_ns()"),
        (clocked, "from time import time\nassert time() < end"),
        (clocked, "import time\nlimit = time.time() + 60"),
        (clocked, "import time\ntime.sleep(0.05)"),
        (clocked, "from time import sleep\nsleep(wait * 5e-3)"),
        (clocked, "assert start.elapsed_time(end) < 2"),
        (clocked, "from datetime import datetime\ndatetime.now()"),
        (clocked, "SCRIPT = 'import time; begun = time.process_time()'"),
        (clocked, "SCRIPT = 'import time; time.sleep(1.5)'"),
        (private, "from tilewright.ops.norm.rmsnorm import _validate"),
        (private, "from tilewright.ops.norm import rmsnorm\nrmsnorm._validate(x)"),
        (private, "from tilewright import platform as p\np._order('1')"),
        (crowded, "def _f(a, b, c, d, e, f, g, *, h, i, j, k): pass"),
        (crowded, "f = lambda a, b, c, d, e, f, g, h, i, j, k: 1"),
        (hoarding, "_loaded: dict = {}"),
        (hoarding, "_loaded = {}"),
        (undocumented, "import torch\ntorch._C._is_tracing()"),
        (undocumented, "x._is_view()"),
        (undocumented, "from torch.utils import _pytree"),
        (undocumented, "import torch._dynamo"),
        (undocumented, "from torch.autograd import forward_ad\nforward_ad._current_level"),
    ],
)
def test_rule_sees_a_planted_fault(rule, source):
    assert list(rule(tree_of(source)))


@pytest.mark.parametrize(
    "rule, source",
    [
        (
            swallowed,
            "try:\n    import triton\nexcept ImportError as error:\n    reason = str(error)",
        ),
        (swallowed, "try:\n    f()\nexcept KeyError:\n    pass"),
        (hoarding, "def f():\n    _loaded = {}"),
        (long, 'def f():\n    """One.\n\n    Two.\n    """\n' + (MOST_LINES - 1) * "    x = 1\n"),
        (long, "# Long: a table.\n# Of x.\n@cache\ndef f():\n" + MOST_LINES * "    x = 1\n"),
        (crowded, f"@triton.jit\ndef f({MANY}): pass"),
        (crowded, f"class A:\n    def f(self, {MANY[4:]}): pass"),
        (crowded, f"class A:\n    # Wide: a model's.\n    def forward(self, {MANY}): pass"),
        (private, "class A(Op):\n    def f(self): return self._table"),
        (private, "class A:\n    def f(self, other): self._table = other._table"),
        (private, "from tilewright.core import checks\nchecks.dense(self._x)"),
        (unlaunched, "launch(_forward, (n,), x, num_warps=4)\nwarm_up(_forward, x)"),
        (positional, "Request(head_dim=64)"),
        (clocked, "monkeypatch.setattr(timing.time, 'perf_counter', lambda: now[0])"),
        (clocked, "import time\ntime.sleep(600)\nSCRIPT = 'time.sleep(600)'\nclock.time()"),
        (patched, "import torch\nclass A: pass\nA.x = 1\nB = torch.nn.Linear"),
        (environment, "import os\nos.path.join('a')"),
        (
            undocumented,
            "import torch\nself._x = torch.ops.aten._unsafe_view(x, torch.nn.Linear.__name__)",
        ),
        (unportable, "if HARDWARE:\n    x = tl.inline_asm_elementwise('')\nelse:\n    x = 1"),
    ],
)
def test_rule_leaves_the_rest_alone(rule, source):
    assert not list(rule(tree_of(source)))


def test_pre_commit_and_the_workflow_run_what_make_does():
    lint = re.findall(
        r"^\t\$\(BIN\)/(.*)$",
        (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0],
        re.M,
    )
    hooks = re.findall(
        r"entry: .venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.M
    )
    assert len(lint) == 4 and hooks == [line.replace("$(BIN)", ".venv/bin") for line in lint]
    assert (
        "run: make test SHARD=${{ matrix.shard }}\n"
        in (ROOT / ".github/workflows/test.yml").read_text()
    )


def test_the_type_checker_reads_everything():
    """Where it is told to look away, a line names the rule and the reason; there is no list of
    accepted errors.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    assert settings["include"] == ["tilewright", "lab/tilewright_lab", "bench"]
    assert settings["exclude"] == ["**/__pycache__"]
    assert settings["typeCheckingMode"] == "basic"
    assert [name for name in settings if name.startswith("report") and not settings[name]] == []
    asking = [
        line
        for path in LIBRARY
        for line in path.read_text().splitlines()
        if re.search(r"# (type|pyright|basedpyright):", line)
    ]
    assert len(asking) <= 5, asking
    assert all(re.search(r"# pyright: ignore\[\w+\] +\(.{5,}\)$", line) for line in asking), asking
    assert not (ROOT / ".basedpyright").exists()


def test_no_test_file_imports_another_and_what_they_share_is_on_its_page():
    library = ROOT / "tests/lib"
    page = (library / "README.md").read_text()
    assert all(f"`{path.stem}`" in page for path in library.glob("*.py"))
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else ()
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            assert not any(n.rpartition(".")[2].startswith("test_") for n in names), path


def test_git_tracks_no_ignored_file_and_no_link():
    """A link to a folder of one machine breaks the checkout of another."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")

    def listed(*options):
        command = ["git", "ls-files", *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()

    assert listed("--cached", "--ignored", "--exclude-standard") == []
    assert [line for line in listed("--stage") if line.startswith("120000")] == []
