"""A golden of your own model: this test fails when what the compiler does to it changes.

Run it with pytest; after reading the difference, accept it with EXPECTTEST_ACCEPT=1.
"""

import torch
from expecttest import assert_expected_inline

import memeff_compile
from memeff_compile.cli.toy import ToyModel  # your own model here


def test_my_model_is_compiled_as_before() -> None:
    memeff_compile.reset()
    model = memeff_compile.compile(ToyModel(vocabulary=64, width=16), inner="eager")
    model(torch.arange(8)).backward()
    assert memeff_compile.last_report().rewrites("fuse_linear_cross_entropy") == 1
    assert_expected_inline(
        memeff_compile.graphs()[-1].after,
        """\
graph(
    embed.weight: param f32[64, 16],
    ids: input i64[8],
    head.weight: param f32[64, 16],
):
    %0: f32[8, 16] = aten.embedding(embed.weight, ids)
    %1: (f32[8], f32[8], f32[0], f32[0], i64[0]) = memeff.linear_cross_entropy(%0, head.weight, None, ids, None, ignore_index=-100, scale=1.0, softcap=0.0, with_lse=False, with_logit_sum=False, gradient_filter='exact', workspace=0)
    %2: f32[8] = getitem(%1, 0)
    %3: b8[8] = aten.ne(ids, -100)
    %4: f32[] = aten.sum(%2)
    %5: i64[] = aten.sum(%3)
    %6: f32[] = aten.div(%4, %5)
    return (%6)""",
    )
