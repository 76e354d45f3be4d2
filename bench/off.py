"""Compile one candidate offline; print registers, stack, smem and loop instruction mix."""
import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memeff_compile.kernels.quantized_attention import tiles_kernels as tk


def build(D=128, rows=64, keys=128, stages=2, warps=4, magic=False, maxnreg=None, cap=90, v="fp8e4nv", out="bf16", ahead=False, kernel="_quantized_attention_kernel", **extra):
    DB = max(64, 1 << (D-1).bit_length())
    k = getattr(tk, kernel)
    c = dict(DEPTH=D, DEPTH_BLOCK=DB, ROWS=rows, KEYS=keys, STAGES=stages, KEY_BLOCK=128, QUERY_BLOCK=128, HAS_AHEAD=ahead, HAS_BEHIND=False, HAS_KEY_MASK=False, HAS_IDS=False, HAS_BOUNDS=False, SCALE_PER_KEY=False, HAS_CORRECTION=False, WITH_LSE=False, MAGIC_SUM=magic, UPCAST=False, DESCRIBED=True)
    pointers = extra.pop("pointers", False); c.update(extra)
    sig, hints = {}, {}
    desc = dict(q_codes=f"tensordesc<i8[{rows},{DB}]>", k_codes=f"tensordesc<i8[{keys},{DB}]>", v_codes=f"tensordesc<{v}[{DB},{keys}]>")
    if pointers: desc = {}; c["DESCRIBED"] = False
    ptr = dict(q_codes="*i8", k_codes="*i8", v_codes="*"+v, out_ptr="*"+out, key_mask_ptr="*u8", query_ids_ptr="*i64", key_ids_ptr="*i64", bounds_ptr="*i32")
    for i, a in enumerate(k.arg_names):
        if a in c: sig[a] = "constexpr"
        elif a in desc: sig[a] = desc[a]
        elif a.endswith("_ptr") or a.endswith("_codes"):
            sig[a] = ptr.get(a, "*fp32"); hints[(i,)] = [["tt.divisibility", 16]]
        else: sig[a] = "i32"
    o = dict(num_warps=warps)
    if maxnreg: o["maxnreg"] = maxnreg
    c = {k_: v_ for k_, v_ in c.items() if k_ in k.arg_names}
    return triton.compile(ASTSource(k, sig, c, hints), target=GPUTarget("cuda", cap, 32), options=o)
BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
def info(comp):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(comp.asm["cubin"]); f.flush()
        res = subprocess.run([BIN/"cuobjdump", "-res-usage", f.name], capture_output=True, text=True).stdout
        sass = subprocess.run([BIN/"nvdisasm", "-c", f.name], capture_output=True, text=True).stdout if (BIN/"nvdisasm").exists() else ""
    return int(re.search(r"REG:(\d+)", res)[1]), int(re.search(r"STACK:(\d+)", res)[1]), comp.metadata.shared, sass
def loops(sass):
    lines = [l for l in sass.splitlines()]
    labels = {}; out = []
    ins = []
    for l in lines:
        m = re.match(r"\s*(\.L_x_\d+):", l)
        if m: labels[m[1]] = len(ins); continue
        m = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", l)
        if m:
            ins.append(m[1])
    for i, t in enumerate(ins):
        m = re.search(r"BRA.*?`\((\.L_x_\d+)\)", t)
        if m and labels.get(m[1], i) < i and i - labels[m[1]] > 150:
            body = ins[labels[m[1]]:i+1]
            ops = collections.Counter(re.sub(r"^@!?U?P\w+\s+", "", b).split()[0].split(".")[0] for b in body)
            out.append((len(body), ops.most_common(26)))
    return out
if __name__ == "__main__":
    kw = eval("dict(" + ",".join(sys.argv[1:]) + ")")
    dump = kw.pop("dump", None)
    comp = build(**kw); r, s, m, sass = info(comp)
    print(kw, "regs", r, "stack", s, "smem", m, "n", comp.name)
    if dump: open(dump, "w").write(sass); open(dump + ".ptx", "w").write(comp.asm["ptx"]); open(dump+".ttgir","w").write(comp.asm["ttgir"])
    for n, ops in loops(sass): print("  loop", n, " ".join(f"{o}:{c}" for o, c in ops))
