"""What the tests of a server share: a small model, and the configuration of a server of it."""

import pytest


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    from serving import write_model

    return write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def file(model_folder, tmp_path):
    from serving import write_server

    return write_server(tmp_path, model_folder)


@pytest.fixture(scope="module")
def sampler(model_folder):
    """The embedded sampler of this model, as an application."""
    from tilewright.sampler.__main__ import served
    from tilewright.sampler.app import application

    made = served(str(model_folder), None, "float32", "cpu", 4096)
    yield application(made)
    made.engine.close()
