"""Train FeDLaS-LS and plain label smoothing on scikit-learn's digits, and compare their calibration.

Five seeds each, seconds on a laptop. Only 300 of the 1,797 images are used for training: with more of them nearly
every prediction is correct, and there is nothing to calibrate.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedlas
from fedlas.metrics import accuracy, ece

SEEDS, EPOCHS, ROWS = 5, 30, 300


def train(name: str, seed: int) -> tuple[float, float]:
    """Train a network with a loss; return its test accuracy and ECE."""
    torch.manual_seed(seed)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x, order = x.float() / 16, torch.randperm(len(x))
    rows, test = order[:ROWS], order[ROWS:]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    net = fedlas.WithFeatures(model)  # 1: returns logits and features
    loss = fedlas.build_loss(name, num_classes=10)  # 2: the loss
    optimizer = torch.optim.SGD(fedlas.parameters(net, loss), lr=0.1, momentum=0.9)  # 3: the loss has parameters too
    for _ in range(EPOCHS):
        for batch in rows[torch.randperm(len(rows))].split(50):
            logits, features = net(x[batch])
            optimizer.zero_grad()
            loss(logits, y[batch], features).backward()
            optimizer.step()

    probs = model(x[test]).detach().softmax(1)
    return float(accuracy(probs, y[test])), float(ece(probs, y[test]))


def report(name: str, results: Tensor) -> str:
    """Return mean and standard deviation over seeds as text."""
    (acc, error), (acc_spread, error_spread) = 100 * results.mean(0), 100 * results.std(0)
    return f"{name:10} accuracy {acc:.1f} ± {acc_spread:.1f} %   ECE {error:.1f} ± {error_spread:.1f} %"


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small is slower on several
    print(f"digits: {ROWS} training images, {SEEDS} seeds, mean ± standard deviation over them")
    for name in ("ce", "ls", "fedlas_ls"):
        print(report(name, torch.tensor([train(name, seed) for seed in range(SEEDS)])))
