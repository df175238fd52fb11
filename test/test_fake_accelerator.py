"""The pretend devices themselves, and what the engine does with them unpatched."""

from __future__ import annotations

import threading

import fake_accelerator
import pytest
import torch
from fake_accelerator import current, races, waits, waits_ignored


@pytest.fixture(autouse=True)
def accelerator():
    fake_accelerator.load()
    fake_accelerator.reset()
    yield
    fake_accelerator.reset()


def new_stream(device="pretend:0"):
    return torch.Stream(device=device)


def event_after(stream):
    event = torch.Event(device="pretend")
    event.record(stream)
    return event


def test_the_devices_compute_what_the_cpu_computes():
    def program(device):
        x = torch.arange(12.0, device=device).reshape(3, 4).t().requires_grad_()
        w = torch.linspace(-1, 1, 9, device=device).reshape(3, 3).requires_grad_()
        y = torch.cat([x @ w, x[1:3].abs()])
        y = y[torch.tensor([0, 4, 1], device=device)].softmax(1).exp() + 1
        y.select(0, 1).mul_(2)
        (y.std() + y.view(-1)[2]).backward()
        return [tensor.detach().cpu() for tensor in (y, x.grad, w.grad)]

    for on_device, on_cpu in zip(program("pretend:1"), program("cpu")):
        assert torch.equal(on_device, on_cpu)
    assert races() == []


def test_tensors_of_two_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="pretend"):
        torch.ones(1, device="pretend:0") + torch.ones(1, device="pretend:1")


def test_each_thread_has_its_own_current_stream():
    seen = []
    with current(new_stream("pretend:1")):
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream("pretend:1")))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream("pretend:1").stream_id != 0
        assert torch.accelerator.current_device_index() == 1
    assert [stream.stream_id for stream in seen] == [0]
    assert torch.accelerator.current_stream("pretend:1").stream_id == 0
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("synchronized", ["no", "event", "stream", "device", "copy to the host"])
def test_a_write_and_a_read_on_two_streams_race_unless_one_waits(synchronized):
    writer = new_stream()
    x = torch.zeros(3, device="pretend:0")
    writer.wait_stream(torch.accelerator.current_stream())
    with current(writer):
        x.fill_(1)
        if synchronized == "copy to the host":
            x.cpu()
    if synchronized == "event":
        event_after(writer).wait(torch.accelerator.current_stream())
    elif synchronized == "stream":
        writer.synchronize()
    elif synchronized == "device":
        torch.accelerator.synchronize("pretend:0")
    x + 1
    if synchronized == "no":
        assert races() == [f"aten::add on pretend:0/0 does not wait for a write on pretend:0/{writer.stream_id}"]
    else:
        assert races() == []


def test_a_write_races_with_an_earlier_read():
    x = torch.zeros(3, device="pretend:0")
    reader = new_stream()
    reader.wait_stream(torch.accelerator.current_stream())
    with current(reader):
        y = x + 1
    x.fill_(1)
    assert [race.split(" on ")[0] for race in races()] == ["aten::fill_"]
    del y


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_under_a_stream_races_unless_recorded(recorded):
    x = torch.zeros(3, device="pretend:0")
    other = new_stream()
    other.wait_stream(torch.accelerator.current_stream())
    with current(other):
        y = x + 1
    if recorded:
        x.record_stream(other)
    del x
    assert [race.split(" on ")[0] for race in races()] == ([] if recorded else ["free"])
    del y


def test_copies_between_devices_wait_for_both_streams():
    x = torch.ones(3, device="pretend:0")
    y = x.to("pretend:1")
    x.fill_(2)
    assert y.cpu().tolist() == [1, 1, 1]
    assert waits() == ["pretend:0/0 waits for pretend:1/0", "pretend:1/0 waits for pretend:0/0"]
    assert races() == []


class Noting(torch.autograd.Function):
    """The identity; backward notes the thread, device and stream it runs on."""

    @staticmethod
    def forward(ctx, x, notes):
        ctx.notes = notes
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stream = torch.accelerator.current_stream(grad.device) if grad.device.type == "pretend" else None
        ctx.notes[str(grad.device)] = (threading.get_ident(), torch.accelerator.current_device_index(), stream)
        return grad, None


def test_the_engine_has_a_thread_for_each_device_and_the_forward_streams():
    notes = {}
    x = torch.ones(3, requires_grad=True)
    streams = [new_stream(device) for device in fake_accelerator.DEVICES]
    total = Noting.apply(x, notes).sum()
    for stream in streams:
        with current(stream):
            total = total + Noting.apply(x.to(stream.device), notes).sum().cpu()
    total.backward()
    assert x.grad.tolist() == [3, 3, 3]
    assert len({thread for thread, *_ in notes.values()}) == 3
    assert notes["cpu"][0] == threading.get_ident()
    for index, stream in enumerate(streams):
        assert notes[f"pretend:{index}"][1:] == (index, stream)
    assert races() == []


def backward_over_two_streams():
    x = torch.ones(3, device="pretend:0", requires_grad=True)
    side = new_stream()
    side.wait_stream(torch.accelerator.current_stream())
    with current(side):
        y = x * 2
    torch.accelerator.current_stream().wait_stream(side)
    y.record_stream(torch.accelerator.current_stream())
    # A root that runs on the main stream: the engine waits for that stream only where the graph says so.
    (x * 3 + y).sum().backward()
    return x


def test_the_engine_waits_between_streams():
    assert backward_over_two_streams().grad.cpu().tolist() == [5, 5, 5]
    assert races() == []


def test_a_wait_that_the_engine_left_out_would_show():
    x = backward_over_two_streams()
    fake_accelerator.reset()
    side = new_stream()
    with current(side):
        y = x * 2
    torch.accelerator.synchronize("pretend:0")
    with waits_ignored():
        (x * 3 + y).sum().backward()
    assert any(race.startswith("aten::add") for race in races())
