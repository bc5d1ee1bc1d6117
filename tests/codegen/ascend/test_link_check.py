"""Link check: the symbols of the shipped libraries, and programs that the compiler accepts and no linker would."""

import pytest

from tapeout.codegen.ascend.bitcode import BitcodeError, defined_functions
from tapeout.codegen.ascend.build import build
from tapeout.codegen.ascend.link_check import LinkError, declared, missing, require_linked
from tests.codegen.ascend import sample_kernels
from tests.codegen.ascend.harness import tools


@pytest.mark.parametrize(("core", "count"), [("aiv", 2334), ("aic", 337)])
def test_symbols_of_the_shipped_libraries(core, count):
    found = defined_functions(tools().library(core).read_bytes())
    assert sum(name.startswith("_mlir_ciface_") for name in found) == count


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(64)])
def test_other_files_are_refused(data):
    with pytest.raises(BitcodeError, match="this is not LLVM bitcode"):
        defined_functions(data)


def test_a_kernel_of_the_tile_contract_links():
    module = build(sample_kernels.product(), tools()).compiled.module
    assert {"nd2nz_bfloat16_t", "mma_tile_bfloat16_t_to_float"} <= set(declared(module))
    assert missing(module, tools()) == {}


def test_a_function_that_no_library_defines():
    module = build(sample_kernels.product(), tools()).compiled.module.replace("nd2nz_bfloat16_t", "nd2nz_float4_e2m1_t")
    assert missing(module, tools()) == {"nd2nz_float4_e2m1_t": "AIC"}
    with pytest.raises(LinkError) as caught:
        require_linked("product", module, tools())
    assert str(caught.value) == ("kernel product would not link: it calls nd2nz_float4_e2m1_t (AIC), defined in no device library of "
                                 "ascendnpuir 1.2.0; write it with ops that the library has")


def test_a_function_of_the_other_core_is_missing():
    """A cube function that vector code calls is as missing as one that exists nowhere."""
    text = ('"func.func"() <{function_type = () -> (), sym_name = "nd2nz_bfloat16_t", sym_visibility = "private"}> ({\n}) '
            "{hivm.func_core_type = #hivm.func_core_type<AIV>} : () -> ()")
    assert missing(text, tools()) == {"nd2nz_bfloat16_t": "AIV"}
    assert missing(text.replace("AIV", "AIC"), tools()) == {}
