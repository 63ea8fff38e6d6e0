"""What a run asks of a cluster, and what it is told where that cannot be: mostly without one."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, Task, ToolCall, ToolContext
from ludus.dist import RayPlacement
from ludus.dist.cluster import Claim, Node, check_room, interface_of, join_ray, look
from ludus.training import Recipe

MINIMAL = {"name": "x", "model": {"scratch": {}}, "tasks": {"train": "x.py:y"}, "rl": {"steps": 1}}


def node(cpus: float, gpus: float = 0.0, name: str = "n") -> Node:
    return Node(f"{name}0123456", "10.0.0.1", cpus, gpus, cpus, gpus)


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    ranks, engines = Claim("trainer rank", 2, gpus=1), Claim("engine", 2, gpus=1)
    there = [node(8, 2, "a"), node(8, 1, "b")]
    with pytest.raises(ConfigError, match=r"no room for one more engine") as caught:
        check_room([ranks, engines], there)
    told = str(caught.value)
    assert "2 x trainer rank (1 CPU and 1 GPU each), 2 x engine (1 CPU and 1 GPU each)" in told
    assert "a01234" in told and "8 CPUs (8 free), 2 GPUs (2 free)" in told and "b01234" in told
    check_room([ranks, engines], [*there, node(1, 1)])


def test_rank_0_needs_a_place_on_the_node_of_the_driver() -> None:
    with pytest.raises(ConfigError, match="trainer rank"):
        check_room([Claim("trainer rank", 1)], [node(0), node(64)])


def test_tools_leave_nodes_with_gpus_to_those_who_need_them() -> None:
    check_room([Claim("trainer rank", 1), Claim("tool actor", 2), Claim("engine", 1, gpus=1)],
               [node(1), node(2), node(1, 1)])  # fmt: skip


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 12))
def test_claims_of_one_kind_fit_exactly_where_they_do(cpus: list[int], count: int) -> None:
    fits = cpus[0] >= 1 and count <= sum(cpus)
    try:
        check_room([Claim("trainer rank", count)], [node(one) for one in cpus])
    except ConfigError:
        assert not fits
    else:
        assert fits


def test_nothing_at_the_address_is_an_error_and_no_hang() -> None:
    pytest.importorskip("ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"nothing answers there.*ray start --head"):
        join_ray(address)
    with pytest.raises(ConfigError, match="host:port"):
        join_ray("somewhere")


def test_a_recipe_is_on_ray_by_address_or_nodes() -> None:
    for table, is_on_ray in (({}, False), ({"nodes": 2}, True), ({"address": "local"}, True)):
        assert Recipe.parse({**MINIMAL, "cluster": table}, "test").cluster.is_on_ray is is_on_ray


def test_tools_on_a_cluster_need_one() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.tools = 2 needs a Ray cluster"):
        Recipe.parse({**MINIMAL, "cluster": {"tools": 2}}, "test")
    assert Recipe.parse({**MINIMAL, "cluster": {"tools": 2, "nodes": 2}}, "test").cluster.is_on_ray


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


@pytest.mark.timeout(120)
async def test_a_cluster_of_our_own_hosts_tools_and_is_gone_afterwards() -> None:
    """The one test of the default suite that starts Ray: on this machine, for a few seconds."""
    ray = pytest.importorskip("ray")
    placement = RayPlacement(
        "mine", address="local", nodes=1, ranks=1, engines=0, tools=1, hosts=1, gpus=False
    )
    try:
        tools = await placement.host_tools(["calculator"])
        episode = ToolContext("e", Task.of("go"))
        await tools.open(episode)
        answer = await tools.call(ToolCall("calculator", {"expression": "6 * 7"}), episode)
        assert answer.content == "42" and answer.fault is None
        placement.report("RL", 3, 9, {})
        while not (found := look().actors)[0].facts:  # the report is on its way
            pass
        assert [(one.run, one.role, one.state) for one in found] == [
            ("mine", "trainer", "alive"),
            ("mine", "tools", "alive"),
        ]
        assert found[0].facts == {"phase": "RL", "step": 3, "steps": 9}
        assert found[0].pid == os.getpid() != found[1].pid
    finally:
        await placement.close()
    assert not ray.is_initialized()
    assert not os.path.exists(f"/proc/{found[1].pid}")  # noqa: ASYNC240, PTH110
