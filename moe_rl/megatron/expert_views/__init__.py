"""Views of Megatron's expert modules by slot: one file per kind of module, one line per kind in `registry`."""
