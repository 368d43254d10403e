"""Every layer family against a loop over samples: all verbs, both passes, three dtypes, N = 0, 1 and several."""

import pytest
import torch
from families import FAMILIES
from layers_table import proves

import dpfast
from dpfast.taps import registry
from dpfast.testing import check_rule

NOT_OF_CUDA = {("nn.EmbeddingBag", "max"): {"dtypes": (torch.float64, torch.float32)}}  # torch has no bf16 there


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, request):
    rule, cases = FAMILIES[family]
    for what, module, inputs in cases():
        try:
            check_rule(
                module, *inputs, **NOT_OF_CUDA.get((family, what), {}) if next(module.parameters()).is_cuda else {}
            )
        except Exception as error:
            raise AssertionError(f"{family}, {what}: {error}") from error
        rules = {use.rule for use in dpfast.explain(module, *inputs).uses}
        assert rule in rules or rule.startswith("of "), f"{family}, {what}: {rules}"
        assert rule.startswith("functorch") or not any(r.startswith("functorch") for r in rules)
    proves(request.config, family, rule, [what for what, _, _ in cases()])


def test_check_rule_notices():
    class Wrong(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    @dpfast.register_grad_sampler(Wrong)
    def sampler(layer, activations, backprops):
        return {layer.weight: activations[0] * backprops * (1.0 + 1e-4)}

    with pytest.raises(AssertionError, match=r"grad_sample of weight \(torch.float32, . samples\)"):
        check_rule(Wrong(), torch.randn(4, 3))
    dpfast.register_grad_sampler(Wrong)(lambda layer, a, b: {layer.weight: a[0] * b})
    check_rule(Wrong(), torch.randn(4, 3))
    registry.RULES.pop(Wrong)
