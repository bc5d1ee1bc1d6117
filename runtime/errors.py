"""Everything the runtime refuses, one class each: a code, a sentence, a place, what was found and expected, what to do.

A message reads `[code] sentence - where - found / expected - remedy`. docs/runtime.md lists the codes. Nothing here reads a file.
"""

from collections.abc import Sequence
from typing import ClassVar


class TapeoutError(Exception):
    """A refused input or an exhausted resource of the runtime. `where` names file and key, field, operand or request."""

    code: ClassVar[str] = "R000"
    exit_code: ClassVar[int] = 1
    sentence: ClassVar[str] = "the runtime refused its input"
    remedy: ClassVar[str] = "see docs/runtime.md"

    def __init__(self, where: str, found: object = None, expected: object = None, *, remedy: str | None = None) -> None:
        self.where, self.found, self.expected = where, found, expected
        self.advice = remedy or type(self).remedy
        facts = [f"found {found}"] if found is not None else []
        facts += [f"expected {expected}"] if expected is not None else []
        parts = [f"[{self.code}] {self.sentence}", where, ", ".join(facts), self.advice]
        super().__init__(" - ".join(part for part in parts if part))


MOST_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """What a message says of a value that a caller gave: its `repr`, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than some thousand digits
        return f"an {type(value).__name__} that is too long to print" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…"


# -- the artifact (section 5 of the design; docs/runtime.md, artifact)

RECOMPILE = "compile the artifact again with `tapeout compile`"


class ArtifactError(TapeoutError):
    """An artifact folder is refused."""

    remedy = RECOMPILE


class ArtifactFolderMissing(ArtifactError):
    code, sentence = "A101", "there is no artifact folder"
    remedy = "give the folder that `tapeout compile` wrote"


class ManifestUnreadable(ArtifactError):
    code, sentence = "A102", "the artifact has no readable manifest"


class SchemaUnknown(ArtifactError):
    code, sentence = "A103", "the artifact was written in a schema that this runtime does not read"
    remedy = "compile it again with the installed version: `tapeout compile`"


class FieldsRefused(ArtifactError):
    """Some fields of one file do not fit the schema; `problems` holds them all."""

    code, sentence = "A104", "fields of the artifact do not fit its schema"

    def __init__(self, where: str, problems: Sequence[str], *, remedy: str | None = None) -> None:
        self.problems = tuple(problems)
        shown = "; ".join(self.problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        super().__init__(where, shown, None, remedy=remedy)


class TargetMissing(ArtifactError):
    code, sentence = "A105", "the artifact holds no code for this device"
    remedy = "compile for it: `tapeout compile --target cpu`"


class ManifestEdited(ArtifactError):
    code, sentence = "A106", "the manifest is not the one that was written"


class FileMissing(ArtifactError):
    code, sentence = "A107", "a file of the artifact is missing or cannot be read"


class FileChanged(ArtifactError):
    code, sentence = "A108", "a file of the artifact is not the one that was written"


class ProgramsInconsistent(ArtifactError):
    code, sentence = "A109", "the step programs do not agree with the manifest"


class WeightsInconsistent(ArtifactError):
    code, sentence = "A110", "the list of weight operands contradicts itself"


class CpuFeatureMissing(ArtifactError):
    code, sentence = "A111", "the artifact needs processor features that this machine does not have"
    remedy = "compile for a lower level: `tapeout compile --cpu x86-64-v3`"


class ArtifactOccupied(ArtifactError):
    code, sentence = "A112", "the place for the artifact holds something else"
    remedy = "give another folder, or empty this one"


class ArtifactUnwritable(ArtifactError):
    code, sentence = "A113", "the artifact cannot be written there"
    remedy = "give a folder in a place that can be written and has room"


# -- weights


class WeightsError(TapeoutError):
    """Operands cannot be bound to a checkpoint."""

    remedy = "give the checkpoint that the artifact was compiled for"


class TensorMissing(WeightsError):
    code, sentence = "W101", "the checkpoint lacks a tensor that a kernel reads"


class TensorMismatch(WeightsError):
    code, sentence = "W102", "a tensor of the checkpoint is not stored as the artifact expects"


class TransformUnknown(WeightsError):
    code, sentence, remedy = "W103", "a weight transform is not one this runtime has", RECOMPILE


class TransformRefused(WeightsError):
    code, sentence, remedy = "W104", "a weight transform does not fit its tensor", RECOMPILE


class ZeroScales(WeightsError):
    """Byte 0 stands for 2^-127: all of a tensor's weights would vanish."""

    code, sentence = "W105", "a scale tensor is all zero bytes"
    remedy = "repair the checkpoint; a neutral E8M0 scale is byte 127"


class TableUnavailable(WeightsError):
    code, sentence = "W106", "a derived table cannot be built"
    remedy = "give a checkpoint folder with its tokenizer.json"


class ScaleTooLarge(WeightsError):
    """The fast forms of products merge scales with other powers of two; beyond a limit the sum of exponents leaves BF16."""

    code, sentence = "W108", "a scale is larger than the artifact's kernels can multiply by"
    remedy = "repair the checkpoint, or compile with tuning rows that set override to 0"


class ScaleTooSmall(WeightsError):
    """As above: below a limit a weight leaves the numbers of BF16, and row counts whose kernels differ would give different bits."""

    code, sentence = "W109", "a scale is smaller than the artifact's kernels can multiply by"
    remedy = "repair the checkpoint, or compile with tuning rows that set override to 0"


class OtherModel(WeightsError):
    code, sentence = "W107", "the checkpoint is of another model than the artifact"


# -- devices


class DeviceError(TapeoutError):
    """The device cannot do what the artifact asks for."""


class LibraryUnloadable(DeviceError):
    code, sentence, remedy = "D101", "the kernel library cannot be loaded", RECOMPILE


class SymbolMissing(DeviceError):
    code, sentence, remedy = "D102", "the kernel library lacks a kernel that the manifest lists", RECOMPILE


class StepFault(DeviceError):
    """The device fails while it works. In a step this is the loss of it: `driver.py` makes a StepLost of it."""


class StepLost(DeviceError):
    """Raised by a device that lost a step; the requests in it end as `error`, the others are unharmed."""

    code, sentence, remedy = "D120", "the device lost a step", "submit the request again"


class LogitsNotFinite(DeviceError):
    """The end of a request of whose tokens one was drawn from a NaN or an infinity; the others of the step are unharmed."""

    code, sentence = "D121", "the logits of a token are not finite"
    remedy = "check the checkpoint's files; where they are whole, the device"


class DeviceClosed(DeviceError):
    code, sentence, remedy = "D114", "the device is closed", "make another engine"


class WorkersRefused(DeviceError):
    code, sentence, remedy = "D103", "the number of workers is refused", "give a whole number from 1 to 256"


class MemoryRefused(DeviceError):
    code, sentence = "D104", "the machine cannot give the memory that the artifact needs"
    remedy = "give fewer cache blocks, or compile with fewer sequences or a smaller context"


class DriverMissing(DeviceError):
    """Nothing is wrong with the input: this machine lacks a tool."""

    code, sentence, exit_code = "D105", "this machine has no usable GPU driver", 3
    remedy = "install the NVIDIA driver and cuda-bindings on a machine with a GPU, or give --device cpu"


class DriverOld(DeviceError):
    code, sentence = "D106", "the GPU driver is older than the artifact's binaries"
    remedy = "update the driver, or compile with an older Triton"


class ChipMismatch(DeviceError):
    code, sentence = "D107", "the artifact's binaries are for another GPU"
    remedy = "compile for this one: `tapeout compile --target sm90` or another of its targets"


class BinaryRefused(DeviceError):
    code, sentence, remedy = "D108", "the GPU does not take a kernel of the artifact", RECOMPILE


class DeviceFailed(StepFault):
    code, sentence = "D109", "a call of the GPU driver failed"
    remedy = "run the step under compute-sanitizer, and report the artifact"


class SimulatedFault(StepFault):
    code, sentence = "D110", "the simulator refuses what a kernel of the artifact does"
    remedy = "report the artifact and the prompt: a compiler made a kernel that is wrong"


class NpuMissing(DeviceError):
    """Nothing is wrong with the input: this machine lacks a tool."""

    code, sentence, exit_code = "D111", "this machine has no usable Ascend driver", 3
    remedy = "install CANN 9.2 or later on a machine with an Ascend 950, or give --device ascend-sim"


class ObjectMissing(DeviceError):
    code, sentence = "D112", "a kernel of the artifact has no object file for the NPU"
    remedy = "run `tapeout finish ARTIFACT` where the back end of CANN is, or give --device ascend-sim"


class NpuFailed(StepFault):
    code, sentence = "D113", "a call of the Ascend driver failed"
    remedy = "run the prompt with --device ascend-sim, and report the artifact where that works"


# -- requests


class RequestError(TapeoutError):
    """A request is refused at the door; nothing of it has run."""


class ParameterError(RequestError):
    """A sampling parameter is refused. Carries `field`, `value`, `allowed` and, once known, `request_id`."""

    remedy = "correct the parameter"

    def __init__(self, field: str, value: object, allowed: str, *, request_id: str | None = None) -> None:
        self.field, self.value, self.allowed, self.request_id = field, value, allowed, request_id
        place = f"SamplingParams.{field}" + (f" of request {request_id}" if request_id is not None else "")
        super().__init__(place, f"{shown(value)} ({type(value).__name__})", allowed)

    def for_request(self, request_id: str) -> "ParameterError":
        """The same refusal, with the request it belongs to."""
        return type(self)(self.field, self.value, self.allowed, request_id=request_id)


class ParameterType(ParameterError):
    code, sentence = "P101", "a sampling parameter has the wrong type"


class ParameterRange(ParameterError):
    code, sentence = "P102", "a sampling parameter is outside its range"


class ParameterUnknown(ParameterError):
    code, sentence = "P103", "there is no such sampling parameter"
    remedy = "remove it, or use the nearest name"


class ParameterUnsupported(ParameterError):
    """The engine at hand cannot do what a valid parameter asks for."""

    code, sentence = "P104", "the compiled sampler cannot do what a sampling parameter asks for"
    remedy = "leave the parameter at the value that is expected, or use an artifact or engine options that have it"


class PromptRefused(RequestError):
    code, sentence = "Q101", "a prompt is refused"
    remedy = "give text, or a non-empty list of token ids of the vocabulary"


class RequestTaken(RequestError):
    code, sentence, remedy = "Q102", "the request id is in use", "give each request its own id"


class RequestsMismatched(RequestError):
    code, sentence = "Q103", "prompts and parameters do not pair up"
    remedy = "give one parameter object for all prompts, or exactly one for each"


class BatchRefused(RequestError):
    code, sentence = "Q104", "a batch of rows does not fit the engine"
    remedy = "split it into steps of at most max_rows rows"


class OptionRefused(RequestError):
    code, sentence, remedy = "Q105", "an engine option is refused", "correct the option"


# -- caches on disk


class CacheError(TapeoutError):
    """A folder of stored blocks and snapshots is refused. Damaged entries are no error: they count as absent."""

    remedy = "give another folder"


class CacheFolderRefused(CacheError):
    code, sentence = "K101", "the folder for stored cache entries cannot be used"


# -- capacity


class CapacityError(TapeoutError):
    """A resource is used up; waiting or a larger engine helps."""

    remedy = "wait for running requests, or give the engine more cache blocks"


class BlocksExhausted(CapacityError):
    code, sentence = "B101", "there are not enough free cache blocks"


class SlotBusy(CapacityError):
    code, sentence = "B102", "the sequence slot is not free"
    remedy = "use another slot, or end its request first"
