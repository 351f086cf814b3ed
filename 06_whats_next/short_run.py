"""A run on one device that writes nothing, for studies and searches."""

from lightning.pytorch import Callback, Trainer

from options import Options


def make_short_trainer(
    options: Options, callback: Callback, show_progress: bool = True
) -> Trainer:
    """Lightning's loop for the steps and validations of the options."""
    return Trainer(
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_epochs=1,  # the sampler's only epoch is the whole run
        max_steps=options.max_steps,
        val_check_interval=options.validate_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=show_progress,
        enable_checkpointing=False,
        logger=False,
        callbacks=[callback],
    )
