"""Row movement beside products: a memory-bound kernel on a second stream fills the gaps that a product leaves.

Works because the movers here are small: two programs a multiprocessor, no shared memory, so that they fit beside a
product's one program. The second stream always waits for the first before it starts and is always waited for, so that
no allocation needs to know about it, and a CUDA graph captures both. On the CPU everything runs in order.
"""

import functools

import torch


@functools.lru_cache
def second_stream(device_index: int) -> torch.cuda.Stream:
    """The one extra stream of a device."""
    return torch.cuda.Stream(device_index)


class Beside:
    """Runs functions on the second stream, after what is queued now; `join` makes the current stream wait for them.

    The outputs must have been allocated on the current stream: `run` gets functions that fill given tensors.
    """

    def __init__(self, device: torch.device):
        self.main = self.side = None
        if device.type == "cuda":
            self.main = torch.cuda.current_stream(device)
            self.side = second_stream(self.main.device_index)
            self.side.wait_stream(self.main)

    def run(self, function, *args, **kwargs):
        """Queue `function` and return a ticket for `join`."""
        if self.side is None:
            function(*args, **kwargs)
            return None
        with torch.cuda.stream(self.side):
            function(*args, **kwargs)
        return self.side.record_event()

    def join(self, ticket) -> None:
        """The current stream goes on only after the function of this ticket."""
        if ticket is not None:
            self.main.wait_event(ticket)
