import os, sys, time, json, itertools, traceback, subprocess
sys.argv = sys.argv[:1] + sys.argv[1:]
import concurrent.futures as cf, multiprocessing as mp
sys.path.insert(0, "bench")
T0 = time.time()
NAMES = ("LOOK_WARPS", "LOOK_KEYS", "WRITE_WARPS", "VALUE_KEYS", "QUERY_ROWS", "MOST_CHUNKS")
BASE = (8, 32, 8, 64, 64, 32)
def variants():
    V = [BASE]
    for i, vals in enumerate(((4,), (16, 64), (4, 16), (32, 128), (32, 128), (16,))):
        for x in vals: V.append(BASE[:i] + (x,) + BASE[i + 1:])
    return V + [(8, 32, 16, 128, 32, 32), (4, 16, 8, 128, 32, 32)]
def warm(job):
    D, v = job
    try:
        import sage_sweep as s
        torch, tiles, reference, settings, shapes, Conditions = s.setup()
        for n, x in zip(NAMES, v): setattr(tiles, n, x)
        q, k, vv = s.inputs(torch, 2048, D)
        tiles.pack(q, k, vv, Conditions(None, None, None, None, None, D ** -0.5, 0.0, False), settings.settings_for("8b", with_lse=False)); torch.cuda.synchronize()
    except Exception: return f"{job} {traceback.format_exc()[-300:]}"
def case(c):
    import sage_sweep as s
    s.CASES = [c]; return s.run_case(0)
def main():
    import sage_sweep as s
    cases = s.CASES + [dict(M=64, N=1, D=128), dict(M=64, N=2, D=64), dict(M=64, N=17, D=128, level="8b+f16"), dict(M=1, N=1, D=64), dict(M=300, N=300, D=128, ahead=0, kind="bias"), dict(M=300, N=300, D=256), dict(M=300, N=1, D=64, gran="thread")]
    V = variants()
    with cf.ProcessPoolExecutor(14, mp_context=mp.get_context("spawn")) as pool:
        w = [pool.submit(warm, (D, v)) for D in (128, 64) for v in V]
        f = [pool.submit(case, c) for c in cases]
        for c, x in zip(cases, f):
            line = x.result(); print(line if "FAILED" in line or "nan" in line or "False" in line.replace("finite False", "BAD") else line[5:].split(" lse ")[0])
        for x in w:
            if x.result(): print(x.result())
    print(f"warm {time.time()-T0:.0f}s", flush=True)
    torch, tiles, reference, settings, shapes, Conditions = s.setup()
    st = settings.settings_for("8b", with_lse=False)
    def graph_ms(fn, n=9):
        fn(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(4): fn()
        for _ in range(2): g.replay()
        ts = []
        for _ in range(n):
            a, b = torch.cuda.Event(True), torch.cuda.Event(True); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) / 4)
        return sorted(ts)[n // 2]
    from torch.profiler import profile, ProfilerActivity
    for D in (128, 64):
        for N in (4096, 16384) if D == 128 else (4096,):
            q, k, v = s.inputs(torch, N, D); given = Conditions(None, None, None, None, None, D ** -0.5, 0.0, False); rows = []
            for var in V:
                for n, x in zip(NAMES, var): setattr(tiles, n, x)
                try: rows.append((graph_ms(lambda: tiles.pack(q, k, v, given, st)) * 1e3, var))
                except Exception as e: print(var, str(e)[:100])
            base = rows[0][0]; rows.sort()
            print(f"pack D{D} N{N} base {base:.0f}us | " + " ".join(f"{t:.0f}:{','.join(map(str, x))}" for t, x in rows), flush=True)
            for n, x in zip(NAMES, rows[0][1]): setattr(tiles, n, x)
            with profile(activities=[ProfilerActivity.CUDA]) as p:
                for _ in range(5): tiles.attend(q, k, v, given, st)
                torch.cuda.synchronize()
            print("   kernels us:", {e.key[:24]: round(e.self_device_time_total / e.count, 1) for e in p.key_averages() if e.self_device_time_total})
    print(f"swept {time.time()-T0:.0f}s", flush=True)
if __name__ == "__main__": main()
