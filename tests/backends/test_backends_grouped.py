"""Lists of names in an sm90 kernel's text: in order, grouped, within the line, with no annotation torn apart."""

from __future__ import annotations

from mlagen.backends.parts.grouped import WIDTH, interface, shared

STRIDES = [(f"tensor_{number}_stride", "i64") for number in range(12)]
ARGUMENTS = (("q_ptr", "*bf16"), ("out_ptr", "*bf16"), ("topk", "i32"), ("sm_scale_log2", "fp32"), *STRIDES)


def test_each_group_of_arguments_begins_a_line_and_keeps_its_order():
    lines = interface(ARGUMENTS, "BLOCK_H")
    assert lines.argument_lines[:2] == ["q_ptr, out_ptr,", "topk, sm_scale_log2,"]
    assert " ".join(lines.argument_lines) == "".join(f" {name}," for name, _ in ARGUMENTS).strip()
    assert lines.parameter_lines[-1] == "BLOCK_H: gl.constexpr,"
    assert lines.num_arguments == len(ARGUMENTS)


def test_lines_fit_their_width_and_keep_annotations_with_their_names():
    lines = interface(ARGUMENTS).parameter_lines
    strides = lines[2:]
    assert len(strides) > 1
    assert max(map(len, lines)) <= WIDTH
    assert [one.strip() for line in strides for one in line.rstrip(",").split(",")] == [
        f"{name}: gl.int64" for name, _ in STRIDES
    ]


def test_names_in_shared_memory_are_packed_in_the_order_of_their_fields():
    found = shared(("q_l", "q_r"), (), ("q_ready",))
    assert found.shared == ["q_l", "q_r", "q_ready"]
    assert found.shared_lines == ["q_l, q_r,", "q_ready,"]
