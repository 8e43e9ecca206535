import math

import pytest
import torch
import torch.nn.functional as F

from gas.augment import entropy, mh_aug_loss


@pytest.fixture
def outputs():
    return [torch.randn(7, 4, dtype=torch.double, requires_grad=True) for _ in range(3)]


Y = torch.tensor([0, 1, 2, 3, 0, 1, 2])
MASK = torch.tensor([True, False, True, True, False, False, False])


def test_entropy():
    assert torch.allclose(entropy(torch.zeros(2, 5)), torch.full((2,), math.log(5)))
    assert torch.allclose(entropy(torch.tensor([[900.0, 0.0]])), torch.zeros(1))
    p = torch.tensor([0.2, 0.3, 0.5])
    assert float(entropy(p.log())) == pytest.approx(-float((p * p.log()).sum()))


def test_terms(outputs):
    logits, first, second = outputs
    p, q, g = (out.softmax(dim=-1) for out in (first, second, logits))
    supervised = -p[MASK, Y[MASK]].log().mean()
    divergence = (p * (p / q).log()).sum(dim=-1).mean()
    uncertain = -(g * g.log()).sum(dim=-1).mean()
    wanted = supervised + 0.7 * divergence + 0.2 * uncertain
    assert torch.allclose(mh_aug_loss(*outputs, Y, MASK, kl=0.7, h=0.2), wanted)
    plain = mh_aug_loss(*outputs, Y, kl=0, h=0)
    assert torch.allclose(plain, F.cross_entropy(first, Y))
    assert torch.allclose(mh_aug_loss(first, first, first, Y, kl=9, h=0), plain)


def test_gradients_reach_both_views(outputs):
    def divergence(*outputs):
        return mh_aug_loss(*outputs, Y, h=0) - mh_aug_loss(*outputs, Y, kl=0, h=0)

    grads = torch.autograd.grad(divergence(*outputs), outputs[1:])
    assert all(bool((grad != 0).any()) for grad in grads)
    whole = lambda *outputs: mh_aug_loss(*outputs, Y, MASK)  # noqa: E731
    assert torch.autograd.gradcheck(whole, outputs)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_teacher_gets_no_gradient(outputs, as_tensor):
    _, first, second = outputs
    for is_first in (False, True):
        flag = torch.tensor(is_first) if as_tensor else is_first
        loss = mh_aug_loss(*outputs, Y, kl=1, h=0, teacher_is_first=flag)
        loss = loss - F.cross_entropy(first, Y)
        teacher, student = (first, second) if is_first else (second, first)
        p, q = teacher.softmax(dim=-1).detach(), student.softmax(dim=-1)
        wanted = (p * (p / q).log()).sum(dim=-1).mean()
        assert torch.allclose(loss, wanted)
        found = torch.autograd.grad(loss, (teacher, student))
        assert torch.allclose(found[0], torch.zeros_like(found[0]), atol=1e-15)
        assert torch.allclose(found[1], torch.autograd.grad(wanted, student)[0])


@pytest.mark.parametrize("nothing", [MASK & False, torch.empty(0, dtype=torch.long)])
def test_a_batch_without_labels_has_finite_gradients(outputs, nothing):
    unlabelled = torch.full_like(Y, -1)
    loss = mh_aug_loss(*outputs, unlabelled, nothing)
    assert torch.allclose(loss, mh_aug_loss(*outputs, Y) - F.cross_entropy(outputs[1], Y))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, outputs))
    loss = mh_aug_loss(*outputs, unlabelled, nothing, kl=0, h=0)
    assert not any(grad.any() for grad in torch.autograd.grad(loss, outputs))


@pytest.mark.parametrize("flag", [1, "yes", torch.tensor(1), torch.tensor([True, False])])
def test_a_teacher_is_a_truth_value(outputs, flag):
    with pytest.raises(ValueError, match="'teacher_is_first' is .*, expected True, False or None"):
        mh_aug_loss(*outputs, Y, teacher_is_first=flag)


def test_labels_of_other_nodes(outputs):
    for y, mask in ((Y[:4], None), (Y - 1, None), (Y, MASK[:4]), (Y.float(), None)):
        with pytest.raises(ValueError, match="'(y|mask)' "):
            mh_aug_loss(*outputs, y, mask)


def test_shapes(outputs):
    with pytest.raises(ValueError, match=r"'second' has shape \[6, 4\], expected \[7, 4\]"):
        mh_aug_loss(outputs[0], outputs[1], outputs[2][:6], Y)
