"""Faults: one shape, all at once, with the nearest name."""

import pytest

from hyper_parallel.config.errors import ConfigError, Fault, did_you_mean, nearest, raise_faults


def test_every_fault_is_one_line_of_path_fact_and_remedy():
    error = ConfigError([Fault("a.b", "3 is too small", "give 4"), Fault("c", "is missing", "give it")])
    assert str(error) == "a.b: 3 is too small; give 4\nc: is missing; give it"
    assert ConfigError.one("a", "b", "c").faults == (Fault("a", "b", "c"),)


def test_raise_faults_raises_all_or_nothing():
    raise_faults([])
    with pytest.raises(ConfigError) as caught:
        raise_faults(Fault(str(i), "f", "r") for i in range(3))
    assert len(caught.value.faults) == 3


def test_remedies_for_unknown_names():
    assert did_you_mean("lrr", ["lr", "betas"]) == "did you mean 'lr'?"
    assert did_you_mean("zzz", ["lr", "betas"]) == "choose one of betas, lr"
    assert did_you_mean("zzz", []) == "remove it: nothing can be set here"
    assert nearest("stesp", ["steps", "epochs"]) == "steps" and nearest("zzz", ["lr"]) is None
