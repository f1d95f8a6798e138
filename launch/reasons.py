"""SLURM's reasons for a pending job, in words.

Names are those of `job_reason_string` (SLURM, src/common/slurm_protocol_defs.c).
"""

_WORDS = {
    "None": "not looked at yet",
    "Resources": "next in line, waits for free nodes",
    "Priority": "other jobs come first",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "the job it waits for failed: it never starts; cancel it",
    "BeginTime": "not before its start time; a requeued job waits about two minutes",
    "Cleaning": "being requeued, its last start is still ending",
    "JobHeldUser": "held by you: scontrol release {job}",
    "JobHeldAdmin": "held by an administrator: ask your site",
    "JobArrayTaskLimit": "as many of its array as may run at once are running",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved",
    "PartitionDown": "the partition is down: ask your site",
    "PartitionInactive": "the partition is closed: ask your site",
    "PartitionTimeLimit": "its time limit is above the partition's: it never starts; lower it",
    "PartitionNodeLimit": "more nodes than the partition allows: it never starts; lower it",
    "PartitionConfig": "the partition does not allow what it asks for: it never starts",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node has what it asks for: it never starts",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone: it never starts; cancel it",
    "InvalidAccount": "the account is not valid: cancel it and submit with another",
    "InvalidQOS": "the QOS is not valid: cancel it and submit with another",
    "JobLaunchFailure": "the node could not start it: see the job's log, or ask your site",
    "Prolog": "a node is being prepared",
    "FrontEndDown": "a front end is down: ask your site",
}
_BY_PREFIX = {
    "QOSMax": "you have as much as the QOS allows you at once",
    "QOSMin": "the job asks for less than the QOS wants: it never starts",
    "QOSGrp": "all users of the QOS together have as much as it allows",
    "QOS": "a limit of the QOS",
    "AssocMax": "you have as much as your account allows you at once",
    "AssocGrp": "your account has as much as it may use",
    "Assoc": "a limit of your account",
    "MaxJobsPerAccount": "your account has as many jobs as it may have",
    "launch_failed_requeued_held": "a node failed to start it, and SLURM holds it: "
    "scontrol release {job}",
    "launch failed requeued held": "a node failed to start it, and SLURM holds it: "
    "scontrol release {job}",
    "job_requeued_in_held_state": "requeued and held: scontrol release {job}",
    "Nodes required for job are DOWN": "nodes it needs are down, drained or reserved",
}


def in_words(reason: str, job: str) -> str:
    """What a reason means and, where a person can do something, what.

    Args:
        reason: as squeue prints it, such as `Resources` or `ReqNodeNotAvail, May be reserved...`.
        job: for the words.

    Returns:
        Empty for a reason that is not known here.
    """
    name = reason.partition(",")[0]
    if name.startswith(("QOSMax", "AssocMax")) and "PerJob" in name:
        giver = "QOS" if name.startswith("QOS") else "account"
        return f"the {giver} does not allow one job as much: it never starts; ask for less"
    words = _WORDS.get(name) or next(
        (text for prefix, text in _BY_PREFIX.items() if reason.startswith(prefix)), ""
    )
    return words.replace("{job}", job)
