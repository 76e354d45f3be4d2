import sys, re, collections
import tests.kernels.test_quantized_attention_offline as t
import off
for cap, d, ch in ((90,128,{}),(90,64,{}),(90,256,{}),(90,128,dict(SMOOTH_Q=True,WITH_LSE=True,HAS_KEY_MASK=True)),(80,128,{})):
    for comp in t._prepared(cap, d, **ch):
        r, s, m, sass = off.info(comp)
        ld = collections.Counter(re.findall(r"(?:ld|st)\.global[.\w]*", comp.asm["ptx"]))
        print(cap, d, ch, comp.name, "regs", r, "stack", s, "smem", m, dict(ld))
