import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memeff_compile.kernels.quantized_attention import prepare_kernels as pk
import importlib; off = importlib.import_module("off")
def build(name, cap=90, warps=8, v="fp8e4nv", **c):
    k = getattr(pk, name); sig, hints = {}, {}
    base = dict(LIMIT=127, DEPTH=128, DEPTH_BLOCK=128, BLOCK=128, CHUNKS=16, SMOOTH_Q=False, SMOOTH_K=True, SMOOTH_V=True, HAS_KEY_MASK=False, WITH_LSE=False, UPCAST=False, KEYS=64, SAMPLE=8)
    base.update(c); c = {a: b for a, b in base.items() if a in k.arg_names}
    ptr = dict(q_ptr="*bf16", k_ptr="*bf16", v_ptr="*bf16", key_mask_ptr="*u8", q_codes_ptr="*i8", k_codes_ptr="*i8", v_codes_ptr="*"+v)
    for i, a in enumerate(k.arg_names):
        if a in c: sig[a] = "constexpr"
        elif a.endswith("_ptr"): sig[a] = ptr.get(a, "*fp32"); hints[(i,)] = [["tt.divisibility", 16]]
        elif a == "scale": sig[a] = "fp32"
        else:
            sig[a] = "i32"
            if a.startswith("stride") or a in ("keys", "queries", "chunk"): hints[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(k, sig, c, hints), target=GPUTarget("cuda", cap, 32), options=dict(num_warps=warps))
for kw in (dict(name="_look_kernel", warps=4), dict(name="_write_kernel"), dict(name="_write_kernel", warps=4), dict(name="_write_kernel", SMOOTH_Q=True, WITH_LSE=True, HAS_KEY_MASK=True), dict(name="_write_kernel", v="fp16"), dict(name="_write_kernel", v="fp16", cap=80, SMOOTH_Q=True, WITH_LSE=True), dict(name="_write_kernel", DEPTH_BLOCK=256, DEPTH=256), dict(name="_write_kernel", DEPTH_BLOCK=64, DEPTH=40, cap=89)):
    comp = build(**kw); r, s, m, sass = off.info(comp)
    ptx = comp.asm["ptx"]
    import collections
    import re
    ld = collections.Counter(re.findall(r"(?:ld|st)\.global[.\w]*", ptx))
    print(kw, "regs", r, "stack", s, "smem", m, dict(ld))
