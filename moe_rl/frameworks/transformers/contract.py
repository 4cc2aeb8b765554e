"""Transformers' versions and symbols that the adapter relies on, and what a user writes."""

from moe_rl.frameworks.contract import framework_of

FRAMEWORK = framework_of(__file__)
