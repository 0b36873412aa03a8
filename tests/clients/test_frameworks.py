"""LangChain and LlamaIndex, unmodified."""

import pytest
from conftest import MODEL

QUESTION = "What is the capital of France? Answer in one sentence."


def test_langchain(url):
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class City(BaseModel):
        """A city."""

        # A small model does not know where to end; the grammar does.
        name: str = Field(max_length=12)

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60, max_retries=0)
    assert "Paris" in model.invoke(QUESTION).content
    assert "Paris" in "".join(chunk.content for chunk in model.stream(QUESTION))
    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(QUESTION), City)
    called = model.bind_tools([City], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert called.tool_calls[0]["name"] == "City"


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_langchain_embeddings(url):
    from langchain_openai import OpenAIEmbeddings

    # Without the check of lengths, which wants a vocabulary of OpenAI's from the network, it sends texts.
    model = OpenAIEmbeddings(model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0)
    texts = [f"Text number {number}." for number in range(70)]
    vectors = model.embed_documents(texts)
    query = model.embed_query(texts[69])
    assert len(vectors) == 70 and max(range(70), key=lambda at: dot(query, vectors[at])) == 69
    assert dot(query, vectors[69]) > 1 - 1e-5


def test_llama_index_embeddings(url):
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    model = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none", embed_batch_size=16, max_retries=0)
    vectors = model.get_text_embedding_batch([f"Text number {number}." for number in range(40)])
    assert len(vectors) == 40 and dot(vectors[3], model.get_query_embedding("Text number 3.")) > 1 - 1e-5


def test_llama_index(url):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL, api_base=f"{url}/v1", api_key="none", is_chat_model=True, temperature=0, max_tokens=40, max_retries=0
    )
    assert "Paris" in model.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    text = ""
    for part in model.stream_chat([ChatMessage(role="user", content=QUESTION)]):
        text = part.message.content
    assert "Paris" in text
    plain = OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", is_chat_model=False, max_tokens=5, temperature=0)
    assert "Paris" in plain.complete("The capital of France is").text
