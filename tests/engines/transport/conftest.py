"""The tests of transports leave nothing behind, as those of the network engine."""

from tests.engines.net.conftest import _nothing_is_left_behind as _nothing_is_left_behind
