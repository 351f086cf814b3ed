"""Which of torch's operators are called while a test looks on."""

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """The names of all operators that are called, such as aten::mul."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(operator.name().split(".")[0])
        return operator(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """Values that Python asked a tensor for: each would wait for a GPU."""
        return self.names.count("aten::_local_scalar_dense")
