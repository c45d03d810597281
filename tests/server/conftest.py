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
