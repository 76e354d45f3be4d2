"""Random programs, each run twice: by eager PyTorch and by memeff_compile. `python -m fuzz --help`.

A program is lines of source that fill the list `seen` with whatever a user could look at. Where the
name `ours` is true it uses memeff_compile, and where it is false it is its own eager twin.

* `program` runs lines and prints them as a program of its own; `sketch` draws lines at random.
* `logits`, `losses`, `attention`, `verbs` and `caches` say what is drawn, one part each.
* `judge` says what counts as a failure, `shrink` drops the lines that it does not need.
* `worker` goes through the programs of one part; `__main__` watches it, for it may crash.
* `soak` runs few things very often and holds memory and objects.
"""
