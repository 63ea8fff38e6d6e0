"""A model sharded over several processes with FSDP2, and what these processes must agree on.

Every rank holds a part of each parameter, and computes its share of a step's micro-batches. `ShardedModel` is
the root module: FSDP gathers parameters in hooks around a module's forward pass, so decoder and head must both
run inside the root's. Each decoder layer is gathered for its own pass and freed after it.

All ranks make the same passes in the same order, or a collective waits for ever. One that fails (out of memory,
say) is left by the others too: before every collective all ranks tell each other whether they are well
(`RankGroup.agree`), on the host, so that a rank which cannot go on says so where the others would wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ludus.core.failures import LudusError
from ludus.kernels import is_out_of_memory
from ludus.model import unwrapped

R = TypeVar("R")
_WELL, _OUT_OF_MEMORY, _FAILED = range(3)
_TOLD = "_ludus_told"


class PeerFailed(LudusError):
    """Another rank failed. Why is for that rank to say."""


class PeerOutOfMemory(RuntimeError):
    """Another rank ran out of memory, so this rank leaves its pass too."""


class RankGroup:
    """The processes that train one model together, as each of them sees it. Alone, everything is a no-op."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """`mesh` has one dimension, or for HSDP two: (replicas, shards of each)."""
        self.mesh = mesh
        self.rank = 0 if mesh is None else dist.get_rank()
        self.size = 1 if mesh is None else dist.get_world_size()
        self.roots: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
        self.exchanges = 0
        """How many status exchanges the ranks have made."""

    def agree(self) -> None:
        """Wait for all ranks; raise where one of them has failed. Comes before every collective."""
        if self.size == 1:
            return
        worst = self._exchange(_WELL)
        if worst == _OUT_OF_MEMORY:
            raise PeerOutOfMemory("another rank ran out of memory")
        if worst == _FAILED:
            raise PeerFailed("another rank failed")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error, once; they leave the pass that they are in."""
        if self.size == 1 or isinstance(error, PeerFailed) or getattr(error, _TOLD, False):
            return
        setattr(error, _TOLD, True)  # noted there: kept here, its frames would hold the pass's tensors
        if not isinstance(error, PeerOutOfMemory):
            code = _OUT_OF_MEMORY if is_out_of_memory(error) else _FAILED
            if self._exchange(code) == _FAILED and code == _OUT_OF_MEMORY:
                raise PeerFailed("another rank failed") from error
        self.reset()

    def reset(self) -> None:
        """Forget the passes that were left in their midst."""
        for root in self.roots:
            root.reset()

    def _exchange(self, code: int) -> int:
        worst = torch.tensor(code)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        self.exchanges += 1
        return int(worst)

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks, of a tensor on the host."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest on any rank, of a tensor on the host."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def least(self, value: int) -> int:
        """The smallest on any rank."""
        return -int(self.largest(torch.tensor(-value)))

    def _reduced(self, values: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return values
        self.agree()
        reduced = values.clone()
        dist.all_reduce(reduced, operation)
        return reduced

    def norm(self, own: Tensor, device: torch.device) -> Tensor:
        """The norm of all shards together, from that of a rank's own. Replicas hold the same shards."""
        if self.mesh is None:
            return own
        self.agree()
        squares = own.to(device, torch.float64).square()
        dist.all_reduce(squares, group=self.mesh.get_group(self.mesh.ndim - 1))
        return squares.sqrt().float()


ALONE = RankGroup()
_current = ALONE


def current_group() -> RankGroup:
    """The group that this process trains in."""
    return _current


def join_group(device: torch.device, replicas: int) -> RankGroup:
    """Make the group of all processes of `torch.distributed`, which has been initialised."""
    global _current
    size = dist.get_world_size()
    if replicas == 1:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    else:
        names = ("replicate", "shard")
        mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=names)
    _current = RankGroup(mesh)
    return _current


def leave_group() -> None:
    """This process trains alone again."""
    global _current
    _current = ALONE


def group_of(model: nn.Module) -> RankGroup:
    """The group that a model is sharded over."""
    group: RankGroup = getattr(model, "group", ALONE)
    return group


class ShardedModel(nn.Module):
    """The root that FSDP gathers parameters around. It stands wherever a model is trained or read."""

    def __init__(self, model: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.model = model
        self.group = group
        group.roots.add(self)

    def forward(self, function: Callable[..., R], *args: Any) -> R:
        return function(self.model, *args)

    def compute(self, function: Callable[..., R], *args: Any) -> R:
        """function(the model, *args) with all parameters in their places."""
        result: R = self(function, *args)
        if not torch.is_grad_enabled():
            self.reshard()  # the root's own parameters would stay, and miss the next update
        return result

    def get_base_model(self) -> Any:
        """The Hugging Face model, as with an adapter's wrapper."""
        return unwrapped(self.model)

    def reshard(self) -> None:
        """Free the gathered parameters of all parts."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                FSDPModule.reshard(module)

    def reset(self) -> None:
        """Forget a pass that was left in its midst, and its gradients."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                _drop_gradients(module)
        _reset(self)

    @torch.no_grad()
    def wholes(self, *, trainable: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Each parameter (each that is trained), gathered when it is its turn. All ranks must take them all."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or not trainable:
                self.group.agree()
                yield name, whole_of(parameter)


def module_of(model: nn.Module) -> nn.Module:
    """The model itself, of which a sharded one is the root."""
    return model.model if isinstance(model, ShardedModel) else model


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters by the names that they have in the model itself; tied ones once."""
    return module_of(model).named_parameters()


def shard(model: nn.Module, group: RankGroup, parts: Sequence[nn.Module]) -> ShardedModel:
    """Shard a model. What is in parameters on the meta device comes later; the others must be alike everywhere.

    Args:
        model: The module itself.
        group: The ranks.
        parts: The layers, each of which is gathered on its own. The rest is gathered with the root.
    """
    assert group.mesh is not None
    root = ShardedModel(model, group)
    device = _device(group)
    made: dict[nn.Parameter, nn.Parameter] = {}
    options: dict[str, Any] = {
        "mesh": group.mesh,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    shared = _shared_by(root, parts)
    for part in parts:
        _materialise(part, device, made)  # no more than one layer is ever whole
        fully_shard(part, **options)
        made = {parameter: whole for parameter, whole in made.items() if parameter in shared}
    _materialise(root, device, made)
    # An adapter's reference passes through the same modules while the policy waits for its backward pass:
    # nothing of the policy may be left in them then. Else the root's parameters stay until the backward pass.
    fully_shard(root, reshard_after_forward=True if hasattr(model, "peft_config") else None, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            gather: Any = _AgreedAllGather(group)
            scatter: Any = _AgreedReduceScatter(group)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            # weights of the loss sum to 1 over all ranks: gradients are summed, not averaged
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    state: Any = root
    state._get_fsdp_state()._lazy_init()  # else the first pass would put other tensors in the place of these
    return root


def _shared_by(root: nn.Module, parts: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Parameters that stand in more than one part, the rest of the model being one."""
    inside = {module for part in parts for module in part.modules()}
    rest = {p for m in root.modules() if m not in inside for p in m._parameters.values()}
    seen, shared = {p for p in rest if p is not None}, set[nn.Parameter]()
    for part in parts:
        own = set(part.parameters())
        shared |= own & seen
        seen |= own
    return shared


def _device(group: RankGroup) -> torch.device:
    assert group.mesh is not None
    kind = group.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _materialise(
    module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Put everything on the device, parameters on the meta device without their values; tied ones stay tied."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and parameter.device != device:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    own = empty if parameter.is_meta else parameter.detach().to(device)
                    made[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
                inner._parameters[name] = made[parameter]
        for held in (inner._buffers, inner.__dict__):
            for name, tensor in list(held.items()):
                if isinstance(tensor, Tensor):
                    held[name] = tensor.to(device)


# their names since torch 2.13
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocates:
    def __init__(self, group: RankGroup) -> None:
        self._ranks = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AgreedAllGather(_Allocates):
    """All-gather, once all ranks have got to it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._ranks.agree()
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _AgreedReduceScatter(_Allocates):
    """Reduce-scatter, once all ranks have got to it."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> Any:
        self._ranks.agree()
        return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


# Parts and wholes of a parameter. FSDP cuts along the first dimension as `torch.chunk` does: the last ranks may
# have less than the others, or nothing.


def local(tensor: Tensor) -> Tensor:
    """A rank's own part, sharing its memory; of a plain tensor all of it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank has of `like`."""
    if not isinstance(like, DTensor):
        return whole
    first = rows_before(like)
    return whole[first : first + len(local(like))]


def rows_before(tensor: Tensor) -> int:
    """Where in the whole this rank's part begins."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    count, place = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    return min(-(-len(tensor) // count) * place, len(tensor))


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered from all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(part: Tensor, like: Tensor) -> Tensor:
    """A rank's part of something of the shape of `like`, as a tensor that knows the whole's shape."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


# FSDP's state after a pass that did not come to its end. torch 2.13 has `reset_iter_state`; before it the same
# is done by hand.


def _drop_gradients(module: FSDPModule) -> None:
    for group in _groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def _groups(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # torch 2.11
        found = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(found)


def _reset(root: Any) -> None:
    state: Any = root._get_fsdp_state()
    if state._is_root is None:
        return  # nothing has run yet
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    if root.model is not None and torch.cuda.is_available():
        torch.cuda.synchronize()  # what was in flight
    shared = state._comm_ctx
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_states"):
        shared.reduce_scatter_states.clear()
    else:
        shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for one in state._state_ctx.all_states:
        one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
        for group in _groups(one):
            group._all_gather_result = None
            group._post_reduce_event = None
            group._all_reduce_state = None
            group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
