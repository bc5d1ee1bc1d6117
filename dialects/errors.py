"""What the dialects refuse before anything can be imported: this file imports nothing, so that anyone can ask what an error is."""


class MlirMissing(ImportError):
    """The MLIR Python bindings cannot be imported: only compiling needs them, running an artifact does not."""
