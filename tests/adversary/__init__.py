"""An attack on the project, as a program: cases drawn from seeds, each in its own process, and a table of their ends.

    make adversary ARGS="cases=2000 seed=0"          the whole of it, with its table in benchmarks/results/adversary.md
    make adversary ARGS="class=damage seed=123"      one case again; keep=FOLDER leaves its files and output there

A case ends as done right, as a named error (one sentence that names a field or a file), or as refused before anything
was done. It fails by any other exception, a wrong result, code or files of a stranger's choosing, a hang, a crash, or
memory without bound. Cases go through commands and public names; `inside` has the other names that they need.
"""
