"""What to compute and what to load for one stored prefix, decided without a server: python
examples/use_the_planner.py
"""

from sgl_kvtier import EngineShape, Planner, PolicyConfig, Span, Tier, messages

planner = Planner(
    PolicyConfig(restore="both"), EngineShape(page_tokens=16, page_bytes=1 << 20, chunk_tokens=512)
)
stored = ((Span(0, 250), Tier.STORAGE),)
planner.observe(
    messages.RestoreOffered(
        "chat-1", 0.0, prompt_tokens=4100, resident=0, pages=250, sources=stored
    )
)
free = {Tier.DEVICE: 1000, Tier.HOST: 1000}
plan = planner.step(
    messages.StepView(
        now=0.0, waiting=("chat-1",), prefill_tokens=512, slot_open=True, free_pages=free
    )
)
print("mode:", *(f"{start.mode.value} ({start.reason})" for start in plan.starts))
print(
    "loads from the back:", *(f"pages {load.span.start} to {load.span.stop}" for load in plan.loads)
)
print("computes from the front:", *(f"{compute.tokens} tokens" for compute in plan.computes))
