"""What the simulators refuse, one class each; docs/planning.md lists the codes."""

from tapeout.runtime.errors import TapeoutError

MOST_MS = 1e12
"""No recorded time is longer: thirty years."""


class ScenarioRefused(TapeoutError):
    code, sentence, remedy = "S101", "a simulated scenario is refused", "correct the option"


class TraceRefused(TapeoutError):
    code, sentence = "S102", "a recorded trace is refused"
    remedy = "give JSON lines as docs/planning.md describes them"
