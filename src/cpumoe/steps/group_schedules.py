"""Data-parallel scheduler: one scheduler for each group of ranks with tokens of its own, and load balancing."""

from __future__ import annotations

from cpumoe.steps.request import Job
from cpumoe.steps.schedule import Piece, Schedule


class GroupSchedules:
    """A scheduler for each group of ranks, with pages of its own; one if all ranks have the same tokens.

    A new request goes to the group with the least load and stays there. The load of a group is the number of its
    sequences: each has a row in every step until it ends, at an unknown time. Ties go to the group with the most cached
    pages of the prompt, then to the one with the fewest prompt tokens to compute.

    Args:
        schedules: one for each group, all alike.
    """

    def __init__(self, schedules: list[Schedule]) -> None:
        self.groups = schedules

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not any(group.sequences for group in self.groups)

    def add(self, job: Job) -> None:
        """Add a request. All of its tokens must fit into the pages of a group."""

        def work(group: Schedule) -> tuple[int, int, int]:
            unread = sum(sequence.pending for sequence in group.sequences)
            return len(group.sequences), -group.known_pages(job), unread

        min(self.groups, key=work).add(job)

    def drop_ended(self) -> list[Job]:
        """Drop the sequences of finished requests, and return these requests."""
        return [job for group in self.groups for job in group.drop_ended()]

    def next_step(self, prompt_rows: int) -> list[list[Piece]]:
        """Return the chunks of the next step of each group; none for a group without sequences.

        While sequences of any group are decoding, at most ``prompt_rows`` rows of each group are of prompts: no group's
        step ends before those of the others.
        """
        goes_on = any(group.goes_on for group in self.groups)
        return [group.next_step(prompt_rows, others_go_on=goes_on) for group in self.groups]
