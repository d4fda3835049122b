"""What is wrong with settings."""

import pytest

from redpoll.config.config import ConfigError, load


def faults_of(flags=None, environment=None, config_path=None) -> dict[str, str]:
    """The text of every fault by its path."""
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, environment or {}, config_path)
    return {fault.path: fault.text for fault in caught.value.faults}
