"""A replay replaces every argument that the structs of csrc declare as a pointer."""

from __future__ import annotations

import re

from tests import pointer_arguments

# Structs with pointers to mapped memory and host memory. Such memory does not move, so a replay does not replace the pointers.
OF_SLOTS = {"Waiting", "SlotBases"}


def pointers(body: str) -> frozenset[int]:
    """Return the indices of the 64-bit words of a struct that are pointers. A field is one word, except a Matrix (five
    words) and arrays (kAgreed words)."""
    found, word = set[int](), 0
    for field in re.sub(r"//.*|const ", "", body).split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(\w+)(.*)", field, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(","):
            count = 8 if "[kAgreed]" in name else 1
            found |= {word} if kind == "Matrix" else set(range(word, word + count)) if "*" in name else set()
            word += 5 if kind == "Matrix" else count
    return frozenset(found)


def test_every_pointer_of_a_job_is_an_address():
    source = (pointer_arguments.CSRC / "kernels.h").read_text()
    jobs = dict(re.findall(r"struct (\w+) \{(.*?)\n\};", source, re.DOTALL))
    named = {name: body for name, body in jobs.items() if "addresses = " in body and name not in OF_SLOTS}
    assert len(named) > 20
    for name, body in named.items():
        fields, said = body.split("static constexpr uint32_t addresses = ")
        assert pointers(fields) == pointer_arguments.words(said.strip("; \n")), name


def test_all_steps_are_read():
    steps = pointer_arguments.addresses()
    assert len(steps) == (pointer_arguments.CSRC / "bindings.cpp").read_text().count('bind_step(m, "')
    assert steps["copy_rows"] == (True, False, True, False, False, False), "from and to"
    assert steps["push_part"] == (True, False, False, False, False), "a peer's memory stays where it is"
