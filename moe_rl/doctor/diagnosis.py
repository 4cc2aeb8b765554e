"""Turn a run and an environment into findings, which can be printed or written as JSON."""

from dataclasses import dataclass

from moe_rl.core.mappings import attributes, not_none
from moe_rl.doctor.checks.registry import TRAPS
from moe_rl.doctor.environment import Environment
from moe_rl.doctor.traps import ERROR, SEVERITIES, Case, Found, Trap
from moe_rl.doctor.verdict import AttachVerdict, attach_verdict
from moe_rl.launch.readers import READERS
from moe_rl.launch.settings import KINDS, ReadRun, RunSettings

SCHEMA = "moe_rl.doctor/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A trap that the run is in."""

    trap: Trap
    severity: str
    sentence: str
    remedy: str
    places: tuple[str, ...]
    """`file:line` of every value that the finding is about."""

    @classmethod
    def of(cls, trap: Trap, symptom: Found) -> "Finding":
        """Return one occurrence of a trap, with the trap's own severity and remedy unless it has others."""
        places = [str(setting.where) for setting in symptom.settings if setting.where is not None]
        return cls(
            trap=trap,
            severity=symptom.severity or trap.severity,
            sentence=symptom.sentence,
            remedy=symptom.remedy or trap.remedy,
            places=tuple(dict.fromkeys(places)),
        )

    def as_json(self) -> dict[str, object]:
        """Return the finding's part of the document."""
        return {
            "trap": self.trap.name,
            "severity": self.severity,
            "title": self.trap.title,
            "finding": self.sentence,
            "why": self.trap.why,
            "remedy": self.remedy,
            "source": self.trap.source,
            "places": list(self.places),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that the doctor found."""

    run: ReadRun | None
    environment: Environment | None
    findings: tuple[Finding, ...]
    num_checked: int
    """Number of traps that were checked."""
    attach: bool
    verdict: AttachVerdict | None = None
    """Whether `attach` would accept the run; None if that was not asked."""

    def count(self, severity: str) -> int:
        """Return how many findings there are of that severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that stop the run, hang it, or make it compute something else."""
        return tuple(finding for finding in self.findings if finding.severity == ERROR)

    @property
    def healthy(self) -> bool:
        """Whether there is no error and, with `attach`, the run would be accepted."""
        return not self.errors and (self.verdict is None or self.verdict.accepts)

    def as_json(self) -> dict[str, object]:
        """Return the document; keys may be added, never renamed."""
        run, environment = self.run, self.environment
        document: dict[str, object] = {
            "schema": SCHEMA,
            "healthy": self.healthy,
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "num_checked": self.num_checked,
            "attach": self.attach,
            **({"verdict": self.verdict.as_json()} if self.verdict else {}),
            "findings": [finding.as_json() for finding in self.findings],
        }
        if run is not None:
            document["run"] = {
                "framework": run.settings.framework,
                "files": list(run.files),
                "num_ignored_settings": run.num_ignored,
                "unresolved": list(run.unresolved),
                "notes": list(run.notes),
                "settings": settings_as_json(run.settings),
            }
        if environment is not None:
            document["environment"] = {
                "python": environment.python,
                "packages": dict(sorted(environment.versions.items())),
                "checked": environment.trains,
            }
        return document


def examine(run: ReadRun | None, environment: Environment | None, *, attach: bool = False) -> Diagnosis:
    """Return what is wrong with a run, with an installation, or with both; errors first.

    An environment without Megatron does not train, so it is not checked.
    """
    # Users on a laptop ask about a run on a cluster: what is missing here says nothing about that run.
    own_environment = None
    if environment is not None and environment.trains:
        own_environment = environment
    if run is not None:
        settings = run.settings
    else:
        settings = RunSettings()
    reader = None
    if run is not None:
        reader = READERS[settings.framework]
    trains_by_rl = reader is not None and reader.trains_by_rl
    case = Case(settings=settings, environment=own_environment, attach=attach, trains_by_rl=trains_by_rl)
    looked_for = [trap for trap in TRAPS if trap.concerns(reader)]
    findings: list[Finding] = []
    for trap in looked_for:
        findings += [Finding.of(trap, symptom) for symptom in trap.check(case)]
    # Stable: inside a severity findings stay in the order of traps.yaml.
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(
        run=run,
        environment=environment,
        findings=tuple(findings),
        num_checked=len(looked_for),
        attach=attach,
        verdict=attach_verdict(run) if attach and run is not None else None,
    )


def settings_as_json(settings: RunSettings) -> dict[str, object]:
    """Return every known setting: its value, how it was written, and where."""
    document: dict[str, object] = {}
    for name, setting in not_none(attributes(settings, KINDS)).items():
        facts = {"value": setting.value, "written": setting.written}
        if setting.where:
            facts["where"] = str(setting.where)
        document[name] = facts
    return document
