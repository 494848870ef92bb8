"""The schedules of all groups of ranks that have tokens of their own: which group computes a job, and their steps."""

from __future__ import annotations

from cpumoe.steps.request import Job
from cpumoe.steps.schedule import Piece, Schedule


class GroupSchedules:
    """A schedule for each group of ranks, with pages of its own; one where all ranks have the same tokens.

    A new job goes to the group with the least work, and stays there. The work of a group is the number of its
    sequences: each of them has a row in every step until it ends, and nobody knows when that will be. Of groups with
    equally many, the one that has most pages of the prompt's beginning is taken, and then the one with the fewest
    tokens to be read.

    Args:
        schedules: one for each group, all alike.
    """

    def __init__(self, schedules: list[Schedule]) -> None:
        self.groups = schedules

    @property
    def tokens(self) -> int:
        """That there is room for in each group: a job has to fit into one of them."""
        return self.groups[0].tokens

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not any(group.sequences for group in self.groups)

    def add(self, job: Job) -> None:
        """Adds a job; all of its tokens must fit into the pages of a group."""

        def work(group: Schedule) -> tuple[int, int, int]:
            unread = sum(sequence.pending for sequence in group.sequences)
            return len(group.sequences), -group.known_pages(job), unread

        min(self.groups, key=work).add(job)

    def drop_ended(self) -> list[Job]:
        """Drops all sequences whose jobs are over."""
        return [job for group in self.groups for job in group.drop_ended()]

    def next_step(self, prompt_rows: int) -> list[list[Piece]]:
        """The pieces of the next step of each group; a group has none if it has no sequences.

        Where sequences of any group wait for their next tokens, at most ``prompt_rows`` rows of each are of prompts:
        no group's step ends before those of the others.
        """
        goes_on = any(group.goes_on for group in self.groups)
        return [group.next_step(prompt_rows, others_go_on=goes_on) for group in self.groups]
