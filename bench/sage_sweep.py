"""GPU: correctness of every kind of call, then the sweep of tiles, then preparation, then the bars."""
import argparse
import concurrent.futures as cf
import json
import math
import multiprocessing as mp
import time
import traceback

T0 = time.time()
ap = argparse.ArgumentParser(); ap.add_argument("--out"); ap.add_argument("--budget", type=float, default=110); a = ap.parse_args()
left = lambda: a.budget - (time.time() - T0)

def setup():
    import torch

    from memeff_compile.kernels.attention.conditions import Conditions
    from memeff_compile.kernels.quantized_attention import reference, settings, shapes, tiles
    return torch, tiles, reference, settings, shapes, Conditions

def dense(torch, q, k, v, ok, scale):
    q, k, v = q.double(), k.double(), v.double(); r = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    s = q @ k.transpose(-1, -2) * scale
    if ok is not None: s = s.masked_fill(~ok[:, None], -math.inf)
    lse = s.logsumexp(-1); p = (s - lse[..., None]).exp().nan_to_num(0.0)
    return p @ v, lse

CASES = []
for D in (64, 128, 256, 40, 80, 96): CASES.append(dict(M=700, N=700, D=D, ahead=0))
CASES += [dict(M=512, N=512, D=128), dict(M=300, N=1000, D=128, ahead=700), dict(M=1000, N=300, D=64, ahead=0), dict(M=129, N=127, D=128), dict(M=1, N=640, D=128), dict(M=640, N=1, D=64),
  dict(M=700, N=700, D=128, level="8b+f16", ahead=0), dict(M=700, N=700, D=64, level="8b+f16"), dict(M=700, N=700, D=128, level="4b", ahead=0), dict(M=300, N=1000, D=64, level="4b"),
  dict(M=700, N=700, D=128, gran="thread", ahead=0), dict(M=700, N=700, D=64, gran="warp"), dict(M=700, N=700, D=128, level="4b", gran="thread"),
  dict(M=900, N=900, D=128, ahead=0, mask=True), dict(M=900, N=900, D=64, ahead=0, ids=True), dict(M=900, N=900, D=128, ahead=0, mask=True, ids=True, behind=200), dict(M=900, N=900, D=256, mask=True, ahead=0), dict(M=900, N=900, D=128, ahead=0, behind=130),
  dict(M=700, N=700, D=128, ahead=0, dt="float32"), dict(M=700, N=700, D=128, ahead=0, dt="float16", kind="bias")]

def run_case(i):
    try:
        torch, tiles, reference, settings, shapes, Conditions = setup()
        c = dict(CASES[i]); M, N, D = c["M"], c["N"], c["D"]; B, H, G = 2, 4, 2
        g = torch.Generator("cuda").manual_seed(i); r = lambda *s: torch.randn(*s, device="cuda", generator=g)
        dt = getattr(torch, c.get("dt", "bfloat16"))
        q, k, v = r(B, H, M, D), r(B, G, N, D), r(B, G, N, D)
        if c.get("kind"): q, k, v = q + 3 * r(B, H, 1, D), k + 4 * r(B, G, 1, D), v + r(B, G, 1, D)
        q, k, v = (x.to(dt) for x in (q, k, v))
        mask = (torch.arange(N, device="cuda")[None] >= torch.tensor([[0], [N // 2 + 5]], device="cuda")) if c.get("mask") else None
        ids = (torch.arange(N, device="cuda") // 250)[None] if c.get("ids") else None
        given = Conditions(mask, ids, ids, c.get("ahead"), c.get("behind"), D ** -0.5, 0.0, False)
        s = settings.settings_for(c.get("level", "8b"), c.get("gran", "row"))
        before = [x.clone() for x in (q, k, v)]
        o, l = tiles.attend(q, k, v, given, s); torch.cuda.synchronize()
        same = all(torch.equal(x, y) for x, y in zip(before, (q, k, v)))
        again = tiles.attend(q, k, v, given, s)[0]
        w, wl = reference.attend(q, k, v, given, s)
        ok = given.counts(0, M, 0, N, q.device); e, el = dense(torch, q, k, v, ok, D ** -0.5)
        d = e.abs().sum(); fin = wl > -1e30
        o_, w_ = o.double(), w.double()
        return f"case {c} vs reference {((o_-w_).abs().sum()/d).item():.5f} exact {((o_-e).abs().sum()/d).item():.5f} (reference {((w_-e).abs().sum()/d).item():.5f}) lse {(l-wl)[fin].abs().max().item():.1e} vs exact {(l-el)[fin].abs().max().item():.2e} empty {torch.equal(l > -1e30, fin)} zero {bool((o_[~fin] == 0).all())} inputs {same} twice {torch.equal(o, again)} finite {bool(o.isfinite().all())}"
    except Exception:
        return f"case {CASES[i]} FAILED " + traceback.format_exc()[-700:]

def shapes_for(D):
    from memeff_compile.kernels.quantized_attention.shapes import Shape
    S = []
    for rows, keys, warps, stages in [(64, 128, 4, 2), (64, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4)]:
        for magic in (False, True): S.append(Shape(rows, keys, warps, stages, magic))
    if D == 128: S += [Shape(64, 128, 4, 2, False, 160), Shape(64, 64, 4, 3, False, 128), Shape(128, 64, 8, 3, False, 128), Shape(128, 64, 8, 3, True, 128)]
    if D == 64: S += [Shape(64, 128, 4, 2, False, 120), Shape(64, 64, 4, 3, False, 96), Shape(128, 64, 8, 3, False, 96), Shape(128, 128, 8, 2, True, 120)]
    if D == 256: S = [Shape(64, 128, 8, 2), Shape(64, 64, 8, 2), Shape(64, 64, 8, 3), Shape(64, 64, 4, 2), Shape(128, 64, 8, 2), Shape(64, 128, 8, 2, True), Shape(128, 32, 8, 2), Shape(128, 128, 16, 2)]
    return S

def inputs(torch, N, D, H=32, G=32, seed=0):
    g = torch.Generator("cuda").manual_seed(seed); r = lambda h: torch.randn(1, h, N, D, device="cuda", dtype=torch.bfloat16, generator=g)
    return r(H), r(G), r(G)

def compile_one(job):
    D, shape, causal = job
    try:
        torch, tiles, reference, settings, shapes, Conditions = setup()
        q, k, v = inputs(torch, 2048, D)
        given = Conditions(None, None, None, 0 if causal else None, None, D ** -0.5, 0.0, False)
        s = settings.settings_for("8b", with_lse=False)
        made = tiles.pack(q, k, v, given, s)
        tiles.attend_packed(made, q, 32, 2048, given, s, shape); torch.cuda.synchronize()
        tiles.attend_packed(made, q, 32, 2048, given, s, shape, 4); torch.cuda.synchronize()
        return None
    except Exception: return f"{job}: {traceback.format_exc()[-300:]}"

def main():
    out = open(a.out, "w") if a.out else None
    def emit(**row):
        if out: out.write(json.dumps(row) + "\n"); out.flush()
    jobs = [(D, s, c) for D in (128, 64, 256) for s in shapes_for(D) for c in (False, True)]
    with cf.ProcessPoolExecutor(14, mp_context=mp.get_context("spawn")) as pool:
        cases = [pool.submit(run_case, i) for i in range(len(CASES))]
        compiled = [pool.submit(compile_one, j) for j in jobs]
        for f in cases: print(f.result(), flush=True)
        for j, f in zip(jobs, compiled):
            if f.result(): print("compile", f.result(), flush=True)
    print(f"compiled {time.time()-T0:.0f}s", flush=True)
    torch, tiles, reference, settings, shapes, Conditions = setup()
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    def ms(fn, n=7, warm=2):
        for _ in range(warm): fn()
        ev = [(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(n)]
        for x, y in ev: x.record(); fn(); y.record()
        torch.cuda.synchronize(); return sorted(x.elapsed_time(y) for x, y in ev)[n // 2]
    s = settings.settings_for("8b", with_lse=False)
    best = {}
    for D in (128, 64, 256):
        for N in (4096, 16384):
            q, k, v = inputs(torch, N, D)
            for causal in (False, True):
                if left() < 25 and D == 256: continue
                given = Conditions(None, None, None, 0 if causal else None, None, D ** -0.5, 0.0, False)
                made = tiles.pack(q, k, v, given, s); fl = 4 * N * N * D * 32 / (2 if causal else 1); rows = []
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION): cudnn = fl / ms(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal), 5) / 1e9
                for shape in shapes_for(D):
                    for together in ((1,) if N == 16384 and D == 256 else (1, 4)):
                        try: t = ms(lambda: tiles.attend_packed(made, q, 32, N, given, s, shape, together), 5 if N > 5000 else 11, 2)
                        except Exception as e: print("time", shape, str(e)[:150]); continue
                        rows.append((fl / t / 1e9, shape, together)); emit(what="kernel", D=D, N=N, causal=causal, ms=t, tflops=fl / t / 1e9, shape=str(shape), together=together)
                rows.sort(key=lambda r: -r[0]); best[D, N, causal] = rows
                print(f"kernel D{D} N{N} c{int(causal)} cudnn {cudnn:.0f} | " + " ".join(f"{t:.0f}:{h.rows}x{h.keys}w{h.warps}s{h.stages}{'m' if h.magic else ''}{'r%d' % h.registers if h.registers else ''}t{g}" for t, h, g in rows[:14]), f"[{left():.0f}s]", flush=True)
            del q, k, v
    for D in (128, 64):
        for N in (4096, 16384):
            q, k, v = inputs(torch, N, D); given = Conditions(None, None, None, None, None, D ** -0.5, 0.0, False)
            line = []
            for warps, keys, chunks, lw in [(8, 64, 16, 4), (4, 64, 16, 4), (8, 128, 16, 8), (8, 32, 16, 4), (8, 64, 8, 4), (8, 64, 16, 8), (4, 64, 8, 8)]:
                tiles.PREPARE_WARPS, tiles.LOOK_KEYS, tiles.MOST_CHUNKS, tiles.LOOK_WARPS = warps, keys, chunks, lw
                if left() < 8: break
                try: t = ms(lambda: tiles.pack(q, k, v, given, s), 11)
                except Exception as e: line.append(str(e)[:80]); continue
                line.append(f"w{warps}k{keys}c{chunks}l{lw} {t*1e3:.0f}us"); emit(what="pack", D=D, N=N, ms=t, warps=warps, keys=keys, chunks=chunks, look_warps=lw)
            tiles.PREPARE_WARPS, tiles.LOOK_KEYS, tiles.MOST_CHUNKS, tiles.LOOK_WARPS = 8, 64, 16, 4
            print(f"pack D{D} N{N}:", " ".join(line), flush=True)
            for causal in (False, True):
                if not best.get((D, N, causal)) or left() < 4: continue
                _, shape, together = best[D, N, causal][0]; given = Conditions(None, None, None, 0 if causal else None, None, D ** -0.5, 0.0, False)
                fl = 4 * N * N * D * 32 / (2 if causal else 1)
                def whole():
                    made = tiles.pack(q, k, v, given, s); return tiles.attend_packed(made, q, 32, N, given, s, shape, together)
                whole(); torch.cuda.synchronize(); gr = torch.cuda.CUDAGraph()
                with torch.cuda.graph(gr): whole()
                t = ms(whole, 11); tg = ms(gr.replay, 11); del gr
                print(f"whole D{D} N{N} c{int(causal)}: eager {fl/t/1e9:.0f} graph {fl/tg/1e9:.0f} TFLOP/s ({tg*1e3:.0f} us)", flush=True); emit(what="whole", D=D, N=N, causal=causal, ms=tg, tflops=fl / tg / 1e9)
    print(f"total {time.time()-T0:.0f}s")
if __name__ == "__main__": main()
