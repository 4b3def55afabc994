"""What travels: the bytes of a dense tensor in the agreed layout."""

import pytest
import torch

from stagekit.run.transport import on_wire, wire_view


@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: torch._neg_view(z), lambda z: z.t().conj()])
def test_what_is_conjugated_or_negated_only_in_name_travels_as_it_reads(make):
    tensor = make(torch.randn(3, 4, dtype=torch.complex64))
    for wire in (on_wire(tensor, tensor.stride()), wire_view(tensor)):
        raw = torch.frombuffer(bytearray(wire.untyped_storage()), dtype=torch.complex64)
        assert torch.equal(torch.as_strided(raw, tensor.shape, tensor.stride()), tensor.resolve_conj().resolve_neg())
