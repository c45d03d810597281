"""Tests of a training server of the Tinker protocol, whoever has written it. See README.md."""
