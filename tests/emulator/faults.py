"""What the emulator reports."""


class Fault(Exception):
    """A kernel does what the PTX ISA leaves undefined, or waits for what never comes."""

    kind = "fault"

    def __str__(self) -> str:
        return f"{self.kind}: {super().__str__()}"


class Race(Fault):
    """Two accesses to the same memory, one of them a write, that no synchronization orders."""

    kind = "race"


class Deadlock(Fault):
    """Nothing can go on."""

    kind = "deadlock"


class Misuse(Fault):
    """A barrier, a descriptor or a collective instruction is used against its rules."""

    kind = "misuse"


class OutOfBounds(Fault):
    """An address is in no tensor of the launch, or not aligned."""

    kind = "out of bounds"


class Unsupported(Fault):
    """The emulator does not know the instruction; nothing is said about the kernel."""

    kind = "not emulated"
