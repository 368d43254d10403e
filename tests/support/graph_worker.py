"""docs/performance.md's step as one CUDA graph, in a process of its own: each replay has the clipped sum of its own
batch and noise of its own."""

import torch

import dpfast
from dpfast.opacus import DPOptimizerFast

N, SIGMA, REPLAYS = 6, 0.5, 100


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 3000), torch.nn.LayerNorm(3000), torch.nn.Linear(3000, 4)).cuda()
    x, y = torch.randn(N, 100, device="cuda"), torch.randint(4, (N,), device="cuda")
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)  # all replays are of one model
    optimizer = DPOptimizerFast(sgd, noise_multiplier=SIGMA, max_grad_norm=1.0, expected_batch_size=N)

    def backward():
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(wrapped(x), y, reduction="none").mean().backward()

    def step():
        backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    noisy = [p.grad for p in model.parameters()]

    x.mul_(-3.0)  # another batch
    found = []
    for _ in range(REPLAYS):
        graph.replay()
        found.append(torch.cat([g.flatten() for g in noisy]).double() * N)
    gradients = torch.stack(found)
    backward()
    clipped = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    noise = (gradients - clipped).flatten()
    # Of so many numbers, mean and deviation are known to less than this.
    assert abs(float(noise.mean())) < 0.01 * SIGMA, noise.mean()
    assert abs(float(noise.std()) / SIGMA - 1.0) < 0.01, noise.std()
    # A replay with the noise of another one would give away the difference of their sums.
    noise = noise.view(REPLAYS, -1)
    assert float((noise @ noise.T).fill_diagonal_(0.0).abs().max()) < 0.05 * SIGMA**2 * noise.shape[1]


if __name__ == "__main__":
    main()
