"""Weights that live compressed (NeuZip, arXiv 2410.20650): bf16, coded exponents, exact.

A bf16 weight's sign and mantissa are close to noise; its exponent carries 2.5 to 2.9 bits of
information in 8. Three codecs store it in fewer, and every pattern comes back bit for bit:

    win4   4 bits in a window of 15 exponents: fastest, about 12.0 bits a weight
    tier   2, 4 or 8 bits by how frequent it is: about 10.7 to 11.1 bits
    rans   an entropy coder, as published: smallest, about 10.6 to 11.0 bits, slowest

    CodedWeight          the tensor that stands where the dense weight stood
    coded_weight_linear  x @ W.T + bias; the backward decodes again
    coded_weight_decode  the dense weight
"""

from __future__ import annotations

from memeff_compile.kernels.coded_weight.codecs import MAX_TOGETHER as MAX_TOGETHER
from memeff_compile.kernels.coded_weight.codecs import Room as Room
from memeff_compile.kernels.coded_weight.codecs import Step as Step
from memeff_compile.kernels.coded_weight.layout import CODECS as CODECS
from memeff_compile.kernels.coded_weight.layout import Format as Format
from memeff_compile.kernels.coded_weight.layout import parse as parse
from memeff_compile.kernels.coded_weight.memory import bits_per_weight as bits_per_weight
from memeff_compile.kernels.coded_weight.memory import bytes_after as bytes_after
from memeff_compile.kernels.coded_weight.memory import bytes_before as bytes_before
from memeff_compile.kernels.coded_weight.op import ENGINES as ENGINES
from memeff_compile.kernels.coded_weight.op import coded_weight_decode as coded_weight_decode
from memeff_compile.kernels.coded_weight.op import coded_weight_linear as coded_weight_linear
from memeff_compile.kernels.coded_weight.op import coded_weight_linears as coded_weight_linears
from memeff_compile.kernels.coded_weight.op import encode as encode
from memeff_compile.kernels.coded_weight.op import encode_into as encode_into
from memeff_compile.kernels.coded_weight.op import engine_for as engine_for
from memeff_compile.kernels.coded_weight.op import make_refuge as make_refuge
from memeff_compile.kernels.coded_weight.op import supports_weight as supports_weight
from memeff_compile.kernels.coded_weight.slabs import side_by_side as side_by_side
from memeff_compile.kernels.coded_weight.tensor import OWN_ATTRIBUTES as OWN_ATTRIBUTES
from memeff_compile.kernels.coded_weight.tensor import CodedWeight as CodedWeight
from memeff_compile.kernels.coded_weight.tensor import Unsettled as Unsettled
from memeff_compile.kernels.coded_weight.tensor import refuse_step as refuse_step
