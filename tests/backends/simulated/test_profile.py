"""The timing model."""

from typing import Any

import pytest

from backends.simulated import PROFILES, SimulatedConfig, TimingProfile


def test_the_reference_machine_decodes_eight_sequences_in_26_ms() -> None:
    step_s = PROFILES["reference"].step_s(8, 8 * 6000)
    assert step_s == pytest.approx(0.026, abs=0.0005)


def test_a_step_pays_for_weights_sequences_kv_and_prefill() -> None:
    profile = TimingProfile(0.01, 0.001, 1e-6, prefill_tokens_per_s=100)
    assert profile.step_s(2, 1000) == pytest.approx(0.013)
    assert profile.step_s(2, 1000, 5) == pytest.approx(0.063)
    assert profile.step_s(0, 1000, 5) == pytest.approx(0.05)
    assert profile.step_s(0, 1000) == 0


def test_scaling_multiplies_every_duration() -> None:
    profile = PROFILES["reference"].scaled(0.1)
    assert profile.step_s(8, 100, 50) == pytest.approx(PROFILES["reference"].step_s(8, 100, 50) / 10)
    assert profile.save_s(100) == pytest.approx(PROFILES["reference"].save_s(100) / 10)
    assert PROFILES["reference"].scaled(0).step_s(8, 100, 50) == 0


def test_the_instant_profile_takes_no_time() -> None:
    profile = PROFILES["instant"]
    assert (profile.step_s(64, 10**6, 512), profile.save_s(10**6), profile.restore_s(10**6)) == (0, 0, 0)


def test_impossible_settings_are_refused() -> None:
    wrong_profiles: list[dict[str, Any]] = [
        {"base_step_s": -1.0},
        {"prefill_tokens_per_s": 0.0},
        {"n_batch": 0},
    ]
    for wrong in wrong_profiles:
        with pytest.raises(ValueError):
            TimingProfile(**wrong)
    with pytest.raises(ValueError):
        PROFILES["fast"].scaled(-1)
    wrong_configs: list[dict[str, Any]] = [
        {"n_slots": 0},
        {"n_ctx": 4},
        {"eos_probability": 2.0},
        {"park_keepalive_s": 0},
    ]
    for wrong in wrong_configs:
        with pytest.raises(ValueError):
            SimulatedConfig(**wrong)
