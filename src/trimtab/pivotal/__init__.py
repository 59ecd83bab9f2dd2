"""Pivotal token search: which tokens of a completion decide whether it succeeds."""

from trimtab.pivotal.find import SearchResult, search
from trimtab.pivotal.oracle import load_oracle
from trimtab.pivotal.policy import Continuation, Request, SearchPolicy
from trimtab.pivotal.records import PivotalToken, write_records
from trimtab.pivotal.settings import SearchSettings
from trimtab.pivotal.trajectory import Question, Trajectory

__all__ = [
    "Continuation",
    "PivotalToken",
    "Question",
    "Request",
    "SearchPolicy",
    "SearchResult",
    "SearchSettings",
    "Trajectory",
    "load_oracle",
    "search",
    "write_records",
]
