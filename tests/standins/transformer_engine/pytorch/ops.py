"""Names in annotations of Megatron's TEFusedMLP, which are read on import; the operations are absent."""


class FusibleOperation:
    """A name."""


class Sequential:
    """A name."""
