"""Whether `automatic` chooses well: the time of it beside that of every form and chunk that competes, over a grid of rules, sizes and dtypes.

    python3 bench/automatic.py                 # with the command built (make verify leaves it in build/release/cli)

Timed by `tercet bench --json`, on one thread pinned to one core: in every round of it all forms and chunks take their turn, and a time is the median
over the rounds. A ratio is the time of automatic over the least of all. Where it is above the limit the case is measured twice more, and the ratio in
the middle counts. Exit code 1: one is above the limit still. Python 3.11 or later, nothing else; some five minutes.
"""

import argparse
import json
import os
import subprocess
import sys

# Each size is timed for every third rule, so that every rule meets every number of tokens, and most of the rest.
RULES = ["linear", "retention", "simple_gla", "gla", "rwkv6", "delta", "gated_delta", "kda", "rwkv7"]
SIZES = [  # tokens, heads, key_dim, value_dim, dtype
    (1, 32, 128, 128, "f32"), (1, 32, 64, 64, "bf16"), (1, 4, 256, 256, "f32"),
    (1, 1, 16, 16, "f64"), (1, 32, 128, 128, "f32"), (1, 32, 96, 64, "f16"),
    (16, 4, 64, 64, "bf16"), (16, 32, 128, 128, "f16"), (16, 32, 128, 128, "f32"),
    (16, 1, 256, 128, "f32"), (16, 4, 16, 64, "f32"), (16, 4, 96, 96, "bf16"),
    (64, 4, 128, 128, "f16"), (64, 1, 128, 256, "f64"), (64, 32, 16, 16, "f32"),
    (64, 32, 64, 64, "f32"), (64, 4, 128, 128, "bf16"), (64, 1, 64, 128, "f64"),
    (512, 1, 96, 128, "f32"), (512, 32, 64, 64, "f32"), (512, 4, 128, 128, "bf16"),
    (512, 4, 128, 128, "bf16"), (512, 4, 256, 256, "f32"), (512, 4, 64, 96, "f16"),
    (2048, 32, 128, 128, "f32"), (2048, 4, 128, 128, "bf16"), (2048, 4, 128, 128, "f32"),
    (2048, 4, 64, 64, "f64"), (2048, 1, 16, 256, "f32"), (2048, 1, 128, 64, "f16"),
]
OWN_CHUNKS = [2, 4]  # of these one is a rule's own, which it computes in one pass over the state
CHUNKS = [16, 32, 64, 128]
PARALLEL_TO = 256  # tokens; the table grows as their square


def measure(arguments, rules, size, rounds):
    """{rule: (ns of automatic, the least ns, whose that is)}."""
    tokens, heads, key_dim, value_dim, dtype = size
    # Automatic with a chunk is the chunkwise form with it, so that one list of chunks does for both.
    forms = ["automatic", "recurrent"] + (["parallel"] if tokens <= PARALLEL_TO else [])
    chunks = [0] + OWN_CHUNKS + [chunk for chunk in CHUNKS if chunk <= tokens]
    command = [arguments.tercet, "bench", "--json", "--rule", ",".join(rules), "--form", ",".join(forms), "--chunk", ",".join(map(str, chunks)),
               "--tokens", tokens, "--heads", heads, "--key-dim", key_dim, "--value-dim", value_dim, "--dtype", dtype, "--repeat", rounds,
               "--seconds", arguments.seconds]
    said = json.loads(subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE).stdout)
    answers = {}
    for rule in rules:
        ns = {}
        for row in said["rows"]:
            if row["rule"] == rule:
                form = row["form"] if row["chunk"] == 0 else "chunks of %d" % row["chunk"]
                ns[form] = row["ns_per_token_head"]
        best = min(ns, key=ns.get)
        answers[rule] = ns["automatic"], ns[best], best
    return answers, said["machine"]


def ratio(answer):
    return answer[0] / answer[1]


def main():
    parser = argparse.ArgumentParser(description="Times automatic beside every form and chunk; the head of this file says more.")
    parser.add_argument("--tercet", default="build/release/cli/tercet", help="the command (default: %(default)s)")
    parser.add_argument("--core", type=int, default=0, help="to be pinned to (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=1.10, help="of the ratio (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.02, help="that a sample lasts at least (default: %(default)s)")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.core})

    cases, machine = [], None
    for number, size in enumerate(SIZES):
        print("automatic: T %d, H %d, K %d, V %d, %s: %d of %d" % (*size, number + 1, len(SIZES)), file=sys.stderr)
        answers, machine = measure(arguments, RULES[number % 3::3], size, arguments.rounds)
        for rule, answer in answers.items():
            if ratio(answer) > arguments.limit:
                again = [measure(arguments, [rule], size, 2 * arguments.rounds + 1)[0][rule] for _ in range(2)]
                answer = sorted([answer, *again], key=ratio)[1]
            cases.append((rule, size, answer))

    print("cpu %s, core %d; tercet %s, target %s, %s" % (machine["cpu"], arguments.core, machine["version"], machine["target"], machine["compiler"]))
    print("ns a token and head, one thread, B = 1\n")
    print("%-12s %5s %4s %4s %4s  %-5s  %10s  %10s  %-14s  %6s" % ("rule", "T", "H", "K", "V", "dtype", "automatic", "best", "which", "ratio"))
    for rule, size, answer in cases:
        print("%-12s %5d %4d %4d %4d  %-5s  %10.1f  %10.1f  %-14s  %6.3f" % (rule, *size, *answer, ratio(answer)))
    above = sum(ratio(answer) > arguments.limit for _, _, answer in cases)
    print("\n%d cases; the largest ratio is %.3f, and %d above %.2f" % (
        len(cases), max(ratio(answer) for _, _, answer in cases), above, arguments.limit))
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
