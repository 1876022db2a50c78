"""Found by Python at its start when this folder is on PYTHONPATH."""

from tests.support.faults import install_from_environment

install_from_environment()
