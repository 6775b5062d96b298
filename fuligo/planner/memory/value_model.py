"""Value model beside a policy: the policy's shape with an output layer of one row."""

from __future__ import annotations

from dataclasses import replace

from fuligo.models.architecture import Architecture, Part, PartKind, Split
from fuligo.planner.subject import Subject


def value_subject(subject: Subject) -> Subject:
    """Return the subject with the value model in place of the policy."""
    return replace(subject, architecture=value_architecture(subject.architecture))


def value_architecture(policy: Architecture) -> Architecture:
    """Return the value model's shapes: no MTP layers, and a head that is not tied to the embedding."""
    head = Part(PartKind.HEAD, policy.hidden_size, Split.REPLICATED, quantisable=False)
    return replace(policy, head=head, tied_embeddings=False, mtp_layers=())
