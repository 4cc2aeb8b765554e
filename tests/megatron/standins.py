"""Import this before Megatron: it then finds the stand-ins of TransformerEngine, DeepEP and Apex in tests/standins.

Cases that do so run in a launch of their own, `@pytest.mark.multi_rank(..., launch="standins")`: what Megatron builds
with depends on what it found when it was imported.
"""

import sys
from pathlib import Path

if "megatron.core" in sys.modules:
    raise ImportError("Megatron was imported without the stand-ins; mark the test launch='standins'.")
sys.path.insert(0, str(Path(__file__).parents[1] / "standins"))
