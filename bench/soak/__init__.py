"""Long runs: failures, fuzzing, upgrades."""
