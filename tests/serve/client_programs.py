"""One tool loop by each of seven client libraries, as their users write it: python client_programs.py NAME

The address and the key come from the environment. Each asks what 2 + 3 is, runs the tool `add` that the model
calls, and prints what the model says in the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

QUESTION, SYSTEM = "What is 2 + 3? Use the tool.", "You add numbers."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}


def with_openai(stream: bool = False) -> str:
    from openai import OpenAI

    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        asked = {
            "model": "policy",
            "messages": messages,
            "tools": [{"type": "function", "function": TOOL}],
        }
        if stream:
            with client.chat.completions.stream(**asked) as events:
                deltas = [event.delta for event in events if event.type == "content.delta"]
                message = events.get_final_completion().choices[0].message
            assert "".join(deltas) == (message.content or "")
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump(exclude_none=stream))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def with_responses(stream: bool = False) -> str:
    from openai import OpenAI

    client = OpenAI()
    items = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {
            "model": "policy",
            "instructions": SYSTEM,
            "input": items,
            "tools": [{"type": "function", **TOOL}],
        }
        if stream:
            with client.responses.stream(**asked) as events:
                deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
                response = events.get_final_response()
            assert "".join(deltas) == response.output_text
        else:
            response = client.responses.create(**asked)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            given = json.loads(call.arguments)
            output = str(given["a"] + given["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def with_anthropic(stream: bool = False) -> str:
    from anthropic import Anthropic

    client = Anthropic()
    tool = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {
            "model": "policy",
            "max_tokens": 99,
            "system": SYSTEM,
            "messages": messages,
            "tools": [tool],
        }
        if stream:
            with client.messages.stream(**asked) as events:
                deltas = list(events.text_stream)
                reply = events.get_final_message()
            assert "".join(deltas) == "".join(b.text for b in reply.content if b.type == "text")
        else:
            reply = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": reply.content})
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": use.id,
                "content": str(use.input["a"] + use.input["b"]),
            }
            for use in uses
        ]
        messages.append({"role": "user", "content": results})


def with_agents(chat: bool = False, stream: bool = False) -> str:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI()) if chat else "policy"
    agent = Agent("adder", instructions=SYSTEM, tools=[add], model=model, model_settings=ModelSettings())
    if not stream:
        return Runner.run_sync(agent, QUESTION).final_output

    async def run() -> str:
        result, said = Runner.run_streamed(agent, QUESTION), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said += event.data.delta
        assert said == result.final_output, (said, result.final_output)
        return result.final_output

    return asyncio.run(run())


def with_langgraph(stream: bool = False) -> str:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    agent = create_react_agent(ChatOpenAI(model="policy"), [add], prompt=SYSTEM)
    asked = {"messages": [("user", QUESTION)]}
    if not stream:
        return agent.invoke(asked)["messages"][-1].content
    said = ""
    for chunk, about in agent.stream(asked, stream_mode="messages"):
        if about["langgraph_node"] == "agent":
            said += chunk.content
    return said


def with_pydantic_ai(stream: bool = False) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("policy"), instructions=SYSTEM)

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    if not stream:
        return agent.run_sync(QUESTION).output

    async def run() -> str:
        async with agent.run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    return asyncio.run(run())


def with_smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: A number.
            b: Another.
        """
        return str(a + b)

    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    agent = ToolCallingAgent(
        [add], OpenAIServerModel("policy", api_base=base, api_key=key), verbosity_level=0, max_steps=3
    )
    return str(agent.run(QUESTION))


def with_litellm(stream: bool = False) -> str:
    import litellm

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    while True:
        reply = litellm.completion(
            "openai/policy", messages=messages, tools=[{"type": "function", "function": TOOL}],
            api_base=os.environ["OPENAI_BASE_URL"], stream=stream,
        )  # fmt: skip
        if stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        message = reply.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def rate_limited() -> str:
    """How openai's client meets a 429."""
    from openai import OpenAI, RateLimitError

    try:
        OpenAI(max_retries=0).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}]
        )
    except RateLimitError as error:
        return f"{error.status_code} {error.code}"
    return "no error"


def impatient() -> str:
    """A client whose patience ends before the reply comes."""
    from openai import OpenAI

    client = OpenAI(timeout=1.5, max_retries=6)
    asked = [{"role": "user", "content": "x"}]
    return client.chat.completions.create(model="m", messages=asked).choices[0].message.content


def parallel() -> str:
    """Many conversations at once over one asynchronous client."""
    from openai import AsyncOpenAI

    async def one(client: AsyncOpenAI, number: int) -> str:
        messages = [{"role": "user", "content": f"question {number}"}]
        for _ in range(3):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "and then?"}]
        return reply.choices[0].message.content

    async def many() -> str:
        async with AsyncOpenAI() as client:
            return ",".join(await asyncio.gather(*(one(client, number) for number in range(8))))

    return asyncio.run(many())


PROGRAMS = {
    "openai": with_openai,
    "openai-stream": lambda: with_openai(stream=True),
    "responses": with_responses,
    "responses-stream": lambda: with_responses(stream=True),
    "anthropic": with_anthropic,
    "anthropic-stream": lambda: with_anthropic(stream=True),
    "openai-agents": with_agents,
    "openai-agents-chat": lambda: with_agents(chat=True),
    "langgraph": with_langgraph,
    "pydantic-ai": with_pydantic_ai,
    "smolagents": with_smolagents,
    "litellm": with_litellm,
    "openai-agents-stream": lambda: with_agents(stream=True),
    "openai-agents-chat-stream": lambda: with_agents(chat=True, stream=True),
    "langgraph-stream": lambda: with_langgraph(stream=True),
    "pydantic-ai-stream": lambda: with_pydantic_ai(stream=True),
    "litellm-stream": lambda: with_litellm(stream=True),
    "rate-limited": rate_limited,
    "impatient": impatient,
    "parallel": parallel,
}

if __name__ == "__main__":
    print(PROGRAMS[sys.argv[1]]())
