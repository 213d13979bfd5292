"""Which test shows that a fault reported against other engines is not ours. By id: tests as
`path::name`, and what is left to whom. `test_faults` holds that they exist and that no test with an
id in its name is forgotten."""

FAULTS: dict[str, tuple[str, ...]] = {
    "A01": (
        "tests/server/test_images.py::test_a01_tiny_pictures_among_normal_ones",
        "tests/models/kimi_vl/test_processor.py::test_a01_one_pixel_pictures_are_one_token_among_others",
        "tests/vision/test_image.py::test_a01_a03_tiny_and_thin_pictures_keep_their_shape",
        "tests/models/nvila/test_nvila_serving.py::test_a01_f25_pictures_of_one_pixel",
    ),
    "A03": (
        "tests/server/test_images.py::test_a03_a28_prompt_tokens_are_the_grids",
        "tests/server/test_images.py::test_a03_a_picture_thinner_than_a_patch",
        "tests/models/kimi_vl/test_processor.py::test_a03_a10_a28_counts_before_pixels_equal_counts_after",
        "tests/vision/test_image.py::test_a01_a03_tiny_and_thin_pictures_keep_their_shape",
    ),
    "A04": (
        "tests/server/test_images.py::test_a04_grey_and_alpha_are_served_one_after_the_other",
        "tests/vision/test_image.py::test_a04_grey_grey_alpha_and_rgba_become_rgb",
    ),
    "A06": (
        "tests/server/test_images.py::test_a06_alpha_lies_over_white",
        "tests/vision/test_image.py::test_a06_alpha_lies_over_white_in_every_mode",
        "tests/vision/test_image.py::test_a06_transparent_colour_is_white_at_every_depth",
        "tests/vision/test_image.py::test_a06_what_alpha_hides_changes_nothing",
    ),
    "A08": (
        "tests/server/test_images.py::test_a08_a10_a_turned_photo_is_seen_upright",
        "tests/models/kimi_vl/test_processor.py::test_a08_a10_grid_comes_from_the_upright_size",
        "tests/vision/test_image.py::test_a08_orientation_is_applied_on_every_path",
        "issue 4: pictures decoded on the GPU",
        "later: pictures by http URL, with the issue that lets the edge fetch",
    ),
    "A10": (
        "tests/server/test_images.py::test_a08_a10_a_turned_photo_is_seen_upright",
        "tests/models/kimi_vl/test_processor.py::test_a03_a10_a28_counts_before_pixels_equal_counts_after",
        "tests/models/kimi_vl/test_processor.py::test_a08_a10_grid_comes_from_the_upright_size",
    ),
    "A11": (
        "tests/server/test_images.py::test_a11_broken_pictures_are_a_plain_400",
        "tests/server/test_images.py::test_a11_no_bytes_at_all",
        "tests/vision/test_image.py::test_a11_cut_off_and_garbage_bytes_are_refused",
        "tests/vision/test_image.py::test_a11_no_file_cut_anywhere_passes_as_whole",
        "tests/models/nvila/test_nvila_serving.py::test_a11_a_broken_video_names_its_part",
        "tests/vision/test_video.py::test_a11_a_truncated_file_is_refused_with_numbers",
        "tests/vision/test_video_files.py::test_a11_an_index_in_front_tells_what_is_missing",
        "tests/vision/test_video_files.py::test_a11_files_without_a_length_are_refused_where_cut_inside",
        "tests/server/test_images.py::test_a11_a_truncated_or_empty_video_is_a_400_with_numbers",
    ),
    "A12": (
        "tests/server/test_images.py::test_a12_animations_give_their_first_frame",
        "tests/server/test_images.py::test_a12_formats_we_do_not_read_are_named",
        "tests/vision/test_image.py::test_a12_formats_are_used_or_refused_by_name",
    ),
    "A15": (
        "tests/server/test_images.py::test_a15_what_is_wrong_with_a_data_url_is_said",
        "tests/vision/test_data_url.py::test_a15_a16_urls",
        "tests/vision/test_data_url.py::test_a15_data_url_says_what_was_wrong",
    ),
    "A16": (
        "tests/server/test_images.py::test_a16_data_urls_in_any_case_with_parameters",
        "tests/vision/test_data_url.py::test_a15_a16_urls",
        "tests/vision/test_data_url.py::test_a16_any_data_url_round_trips",
    ),
    "A19": (
        "tests/server/test_images.py::test_a19_placeholders_and_pictures_agree",
        "tests/engine/test_prepare.py::test_a24_a19_ids_hold_text_and_pictures_in_their_order",
        "tests/vision/test_placeholders.py::test_a19_ids_of_the_caller_may_be_expanded_or_not",
        "tests/vision/test_placeholders.py::test_a19_neighbours_may_touch",
        "tests/vision/test_placeholders.py::test_a19_pads_equal_the_pictures_tokens",
        "tests/vision/test_placeholders.py::test_a19_runs_that_fit_no_picture_are_refused",
        "tests/vision/test_placeholders.py::test_a19_slots_that_are_not_pictures_are_refused",
        "tests/laws/test_nvila_laws.py::test_a19_a_picture_left_out_is_refused_with_both_counts",
        "tests/models/test_nvila_parity.py::test_a19_features_of_fewer_pictures_name_both_counts",
    ),
    "A20": (
        "tests/ops/test_rope.py::test_a20_pair_2i_turns_by_column_and_pair_2i_plus_1_by_row",
        "tests/vision/test_moonvit.py::test_a20_golden_tower_batched_and_alone",
        "tests/vision/test_moonvit.py::test_a20_layer_by_layer",
        "tests/vision/test_projector.py::test_a20_features_of_a_wide_and_a_tall_picture",
        "tests/vision/test_projector.py::test_a20_golden_features_batched_and_alone",
    ),
    "A21": (
        "tests/server/test_images.py::test_a21_the_budget_is_the_checkpoints",
        "tests/engine/test_prepare.py::test_a21_identity_holds_content_rule_and_revision",
        "tests/models/kimi_vl/test_processor.py::test_a21_every_finding_at_once",
        "tests/models/kimi_vl/test_processor.py::test_a21_limits_are_read_from_the_checkpoint",
        "tests/models/kimi_vl/test_processor.py::test_a21_what_the_file_says_is_never_ignored",
        "tests/check/test_injected_faults.py::test_a21_an_unknown_key_of_either_file_is_named",
        "tests/models/nvila/test_nvila_processor.py::test_a21_what_the_file_says_is_never_ignored",
    ),
    "A24": (
        "tests/server/test_images.py::test_a24_a34_order_of_parts_and_pictures_is_the_messages",
        "tests/engine/test_prepare.py::test_a24_a19_ids_hold_text_and_pictures_in_their_order",
        "tests/tokenizer/test_chat.py::test_a24_text_and_images_keep_their_order",
        "later: a route that echoes prompts; prepared ids are compared today",
    ),
    "A26": (
        "tests/models/nvila/test_nvila_serving.py::test_a26_pictures_with_text_text_alone_and_pictures_alone",
    ),
    "A28": (
        "tests/server/test_images.py::test_a03_a28_prompt_tokens_are_the_grids",
        "tests/models/kimi_vl/test_processor.py::test_a03_a10_a28_counts_before_pixels_equal_counts_after",
    ),
    "A32": ("tests/server/test_images.py::test_a32_a_url_as_a_string_is_a_picture_and_never_text",),
    "A34": (
        "tests/server/test_images.py::test_a24_a34_order_of_parts_and_pictures_is_the_messages",
        "tests/engine/test_conversation.py::test_a34_pictures_come_in_the_order_of_their_parts",
    ),
    "B01": ("tests/server/test_stream.py::test_b01_b04_usage_comes_once_in_the_last_chunk",),
    "B02": ("tests/server/test_stream.py::test_b02_usage_is_asked_for_by_its_flag",),
    "B04": ("tests/server/test_stream.py::test_b01_b04_usage_comes_once_in_the_last_chunk",),
    "B05": (
        "tests/server/test_stream.py::test_b05_b06_every_choice_has_a_role_and_one_finish_reason",
    ),
    "B06": (
        "tests/server/test_stream.py::test_b05_b06_every_choice_has_a_role_and_one_finish_reason",
    ),
    "B08": (
        "tests/server/test_faulty_engine.py::test_b08_b11_streams_of_scripted_ids",
        "tests/server/test_stream.py::test_b08_deltas_hold_whole_characters",
        "tests/tokenizer/test_detokenize.py::test_b08_characters_byte_by_byte",
    ),
    "B11": (
        "tests/server/test_faulty_engine.py::test_b08_b11_streams_of_scripted_ids",
        "tests/server/test_stream.py::test_b11_nothing_of_a_stop_string_is_streamed",
        "tests/engine/test_answer.py::test_b11_streamed_text_ends_at_the_first_stop_string",
        "tests/tokenizer/test_detokenize.py::test_b11_nothing_of_the_stop_string_is_emitted",
    ),
    "B14": ("later: reasoning parsers; no thinking text is split off today",),
    "B16": (
        "tests/server/test_stream.py::test_b16_an_echo_of_several_choices_has_the_prompts_logprobs_in_each",
        "tests/server/test_stream.py::test_b16_echo_with_logprobs_is_finite",
        "tests/server/test_writer.py::test_b16_infinite_logprobs_become_a_finite_floor",
    ),
    "B18": (
        "tests/server/test_stream.py::test_b18_candidates_that_are_half_a_character",
        "tests/server/test_writer.py::test_b18_candidates_of_equal_or_no_text_are_all_kept",
        "tests/tokenizer/test_tokenizer.py::test_b18_every_byte_token_has_its_bytes",
    ),
    "B19": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "tests/server/test_bad_input.py::test_b19_other_requests_are_unharmed",
        "tests/engine/test_request.py::test_b19_each_field_has_its_range",
    ),
    "B20": ("tests/server/test_stream.py::test_b20_echo_alone",),
    "B21": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "tests/server/test_bad_input.py::test_b21_a_limit_may_be_absent_or_null",
    ),
    "B23": ("tests/server/test_stream.py::test_b23_completions_default_to_16_tokens",),
    "B24": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "later: schemas; response_format is refused by name today",
    ),
    "B27": (
        "tests/server/test_stream.py::test_b27_choices_are_apart_and_equal_streamed_or_not",
        "tests/engine/test_prepare.py::test_b27_choices_have_names_groups_and_seeds_of_their_own",
    ),
    "B29": (
        "tests/server/test_bad_input.py::test_b29_b31_b32_b47_odd_conversations_are_served",
        "tests/tokenizer/test_chat.py::test_b29_an_assistant_that_only_calls_tools",
        "tests/tokenizer/test_chat.py::test_b29_arguments_that_are_no_object_are_refused",
        "tests/tokenizer/test_chat.py::test_b29_deep_arguments_are_refused",
    ),
    "B31": (
        "tests/server/test_bad_input.py::test_b29_b31_b32_b47_odd_conversations_are_served",
        "tests/tokenizer/test_chat.py::test_b31_empty_is_not_absent",
    ),
    "B32": (
        "tests/server/test_bad_input.py::test_b29_b31_b32_b47_odd_conversations_are_served",
        "tests/server/test_bad_input.py::test_b32_a_list_of_texts_is_the_string",
        "tests/tokenizer/test_chat.py::test_b32_a_list_of_texts_is_the_string",
    ),
    "B34": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "later: tools; tools and tool_choice are refused by name today",
    ),
    "B35": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "later: tools; refused by name today",
    ),
    "B36": (
        "tests/server/test_bad_input.py::test_b19_b21_b24_every_field_refuses_what_it_cannot_honour",
        "later: tools; refused by name today",
    ),
    "B38": (
        "tests/server/test_faulty_engine.py::test_b38_a_failure_before_the_first_token_is_an_http_error",
    ),
    "B40": (
        "tests/server/test_faulty_engine.py::test_b40_a_failure_after_the_headers_is_one_frame",
        "tests/server/test_faulty_engine.py::test_b40_an_engine_that_ends_fails_what_lives_and_refuses_what_comes",
        "tests/server/test_lifecycle.py::test_b40_an_engine_that_dies_mid_stream",
    ),
    "B41": (
        "tests/server/test_disconnect.py::test_b41_leaving_before_prefill_ends",
        "tests/server/test_disconnect.py::test_b41_leaving_in_the_middle_of_a_body",
        "tests/server/test_disconnect.py::test_b41_leaving_while_pictures_are_prepared",
        "tests/server/test_disconnect.py::test_b41_leaving_while_tokens_come",
    ),
    "B43": (
        "tests/server/test_stream.py::test_b43_every_request_equals_its_solo_run",
        "tests/engine/test_sampler.py::test_b43_a_row_is_the_same_alone_and_among_strangers",
        "tests/engine/test_scheduler.py::test_b43_a_draw_depends_on_seed_and_index_alone",
    ),
    "B44": (
        "tests/server/test_stream.py::test_b44_a_turn_ends_with_stop_and_without_its_special",
        "tests/engine/test_answer.py::test_b44_the_id_that_ends_is_not_said_unless_asked_for",
    ),
    "B47": (
        "tests/server/test_bad_input.py::test_b29_b31_b32_b47_odd_conversations_are_served",
        "tests/tokenizer/test_chat.py::test_b47_odd_conversations",
    ),
    "C01": (
        "tests/laws/test_engine_laws.py::test_c01_a_cached_prefix_equals_a_cold_one_and_pictures_never_share",
        "tests/cache/test_manager.py::test_c01_parallel_requests_with_other_pictures_share_only_the_text_before",
        "tests/laws/test_nvila_laws.py::test_c01_a_cached_prefix_and_a_cached_picture_equal_fresh_ones",
    ),
    "C02": (
        "tests/cache/test_page_keys.py::test_c02_same_tokens_other_boundaries",
        "tests/vision/test_image.py::test_c02_digest_covers_the_shape_and_every_pixel",
    ),
    "C05": ("tests/cache/test_page_keys.py::test_c05_an_identity_is_never_a_token",),
    "C07": (
        "tests/engine/test_scheduler_images.py::test_c07_a_picture_may_be_cut_by_chunks_anywhere",
        "tests/models/test_kimi_vl_parity.py::test_c07_a_prompt_cut_at_every_boundary_is_the_whole",
        "tests/models/test_dense_parity.py::test_c07_a_text_cut_at_every_boundary_is_the_whole",
        "tests/laws/test_nvila_laws.py::test_c07_chunked_equals_whole",
        "tests/laws/test_nvila_laws.py::test_c07_lite_is_cut_at_every_boundary",
    ),
    "C10": (
        "tests/engine/test_scheduler_images.py::test_c10_each_picture_is_encoded_once_within_the_budget",
        "tests/engine/test_scheduler_tiles.py::test_c10_each_sequence_is_encoded_once_within_the_budget",
    ),
    "C11": ("tests/cache/test_encoder.py::test_c11_1000_images_do_not_grow_the_cache",),
    "C14": ("tests/engine/test_scheduler.py::test_c14_groups_of_answers_end_in_a_cache_for_two",),
    "C16": (
        "tests/cache/test_encoder.py::test_c16_a_preempted_request_finds_its_image_again",
        "tests/cache/test_manager.py::test_c16_a_preempted_image_request_resumes",
        "tests/laws/test_nvila_laws.py::test_c16_preempted_and_resumed_equals_undisturbed",
    ),
    "C17": ("tests/server/test_bad_input.py::test_c17_too_long_says_both_numbers",),
    "C20": (
        "tests/cache/test_manager.py::test_c20_500_requests_of_which_a_third_abort_leave_nothing",
        "tests/engine/test_scheduler.py::test_c20_no_page_leaks_over_500_requests_of_700_tokens",
    ),
    "C22": (
        "tests/server/test_images.py::test_c22_a_picture_of_a_refused_request_works_afterwards",
        "tests/cache/test_encoder.py::test_c22_a_failed_image_works_the_next_time_and_eviction_ends",
    ),
    "C26": (
        "tests/cache/test_manager.py::test_c26_a_chat_edited_in_turn_2_hits_up_to_the_edit",
        "tests/laws/test_nvila_laws.py::test_c26_the_same_tiles_in_another_block_are_another_picture",
    ),
    "C27": (
        "tests/server/test_faulty_engine.py::test_c27_more_than_the_queue_holds_is_refused_with_retry_after",
        "tests/server/test_images.py::test_c27_bursts_of_pictures_are_all_answered",
    ),
    "D01": (
        "tests/attention/test_reference.py::test_d01_unused_slots_of_the_last_page_never_leak",
    ),
    "D02": (
        "tests/attention/test_reference.py::test_d02_padding_of_shorter_sequences_never_leaks",
    ),
    "D05": (
        "tests/attention/test_merge.py::test_d05_nothing_merged_with_nothing_is_nothing",
        "tests/attention/test_reference.py::test_d05_queries_without_keys_give_zero_and_minus_infinity",
    ),
    "D06": (
        "tests/attention/test_reference.py::test_d06_equal_one_page_sequences_give_equal_rows",
    ),
    "D08": (
        "tests/attention/test_reference.py::test_d08_every_group_size",
        "tests/check/test_faulty_code.py::test_d08_every_group_of_query_heads_is_planned",
    ),
    "D10": ("tests/attention/test_reference.py::test_d10_slots_are_64_bit",),
    "D12": (
        "tests/attention/test_reference.py::test_d12_a_table_too_short_is_refused_by_row_and_capacity",
        "tests/check/test_faulty_code.py::test_d12_a_table_of_pages_holds_the_longest_request",
    ),
    "D14": ("tests/attention/test_triton_work.py::test_d14_any_length_any_splits_no_nan",),
    "D15": ("tests/attention/test_merge.py::test_d15_splits_merged_are_the_whole",),
    "D17": ("tests/attention/test_reference.py::test_d17_caches_of_any_strides",),
    "D19": ("tests/attention/test_reference.py::test_d19_stale_pages_are_not_attended",),
    "D20": ("tests/attention/test_reference.py::test_d20_window_edges",),
    "D22": (
        "tests/attention/test_reference.py::test_d22_a_call_that_was_not_planned_is_refused",
        "tests/check/test_faulty_code.py::test_d22_a_tower_that_attends_in_another_way_than_planned",
        "tests/check/test_faulty_code.py::test_d22_d23_each_layers_window_is_planned_and_shown",
    ),
    "D23": (
        "tests/models/test_dense_readers.py::test_d23_a_window_sees_its_last_key_and_none_before",
        "tests/check/test_faulty_code.py::test_d22_d23_each_layers_window_is_planned_and_shown",
    ),
    "D25": (
        "tests/attention/test_reference.py::test_d25_keys_and_values_of_other_widths",
        "tests/check/test_faulty_code.py::test_d25_keys_and_values_of_other_widths_are_planned_as_they_are",
    ),
    "D26": (
        "tests/attention/test_reference.py::test_d26_any_head_dim",
        "tests/check/test_faulty_code.py::test_d26_any_head_dim_is_planned_or_refused_before_weights",
    ),
    "D27": (
        "tests/attention/test_reference.py::test_d27_empty_batches_and_sequences",
        "tests/ops/test_rope.py::test_d27_tables_of_nothing_are_empty",
    ),
    "D32": (
        "tests/attention/test_reference.py::test_d32_many_heads_softcap_and_window",
        "tests/check/test_faulty_code.py::test_d32_64_heads_are_planned_on_every_gpu",
    ),
    "E01": ("tests/weights/test_weight_load.py::test_e01_fused_qkv_is_cut_by_head_not_by_rank",),
    "E02": (
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
        "later: MiMo, whose architecture is refused by name today",
    ),
    "E05": (
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
        "later: MiMo, whose architecture is refused by name today",
    ),
    "E06": ("tests/check/test_faulty_code.py::test_e06_a_weight_that_nothing_reads",),
    "E07": (
        "tests/models/test_kimi_vl_model.py::test_e07_an_unknown_prefix_names_what_it_may_mean",
        "tests/models/test_kimi_vl_model.py::test_e07_other_writers_names_load_the_same",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E09": (
        "tests/models/test_kimi_vl_model.py::test_e09_blocks_left_out_are_listed",
        "tests/weights/test_weight_plan.py::test_e09_a_block_missing_from_the_index_is_refused",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E10": (
        "tests/models/test_kimi_vl_model.py::test_e10_a_missing_head_that_is_not_tied_is_a_finding",
        "tests/models/test_kimi_vl_model.py::test_e10_a_tied_head_is_the_embedding",
        "tests/models/test_dense_parity.py::test_e10_a_tied_text_head_is_the_embedding",
        "tests/models/test_dense_parity.py::test_e10_an_untied_text_head_that_is_missing_is_refused",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E11": (
        "tests/models/test_kimi_vl_model.py::test_e11_a_tied_head_stored_with_other_values_is_refused",
        "tests/models/test_dense_parity.py::test_e11_a_tied_text_head_is_stored_alike_or_refused",
        "tests/weights/test_weight_load.py::test_e11_a_tied_head_that_differs_is_refused_before_the_engine_is_ready",
        "tests/check/test_injected_faults.py::test_e11_a_tied_head_that_is_stored_is_a_warning",
    ),
    "E14": (
        "tests/weights/test_weight_headers.py::test_e14_a_file_cut_within_its_header",
        "tests/weights/test_weight_headers.py::test_e14_a_file_of_another_size_is_refused_with_both_sizes",
        "tests/weights/test_gguf.py::test_e14_a_gguf_cut_anywhere_is_refused",
        "tests/weights/test_gguf.py::test_e14_a_gguf_of_another_length_is_refused_with_both_sizes",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E15": (
        "tests/weights/test_weight_headers.py::test_e15_missing_shards_are_listed_by_name",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E16": (
        "tests/weights/test_weight_headers.py::test_e16_corrupt_headers_are_one_sentence_naming_the_file",
        "tests/weights/test_weight_headers.py::test_e16_every_corrupt_file_is_named_at_once",
        "tests/weights/test_gguf.py::test_e16_a_corrupt_gguf_is_one_sentence",
        "tests/weights/test_gguf.py::test_e16_a_gguf_with_changed_bytes_is_read_or_refused",
        "tests/weights/test_gguf.py::test_e16_values_that_are_not_finite_are_refused_by_name",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E18": (
        "tests/weights/test_weight_headers.py::test_e18_the_index_decides_and_other_sets_are_a_warning",
        "tests/check/test_injected_faults.py::test_e18_another_set_of_weights_beside_is_a_warning",
    ),
    "E20": (
        "tests/weights/test_weight_headers.py::test_e20_a_tensor_in_two_shards_is_refused_naming_both",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E21": (
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E23": (
        "tests/weights/test_weight_headers.py::test_e23_an_index_of_pickles_is_refused",
        "tests/weights/test_weight_headers.py::test_e23_pickles_are_refused_by_name_and_never_opened",
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
    ),
    "E25": (
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
        "later: adapters that are served; they are refused by name today",
    ),
    "E26": (
        "tests/check/test_injected_faults.py::test_e02_e05_e07_e09_e10_e14_e15_e16_e20_e21_e23_e25_e26_the_row_that_should_find_it_does",
        "later: adapters that are served; they are refused by name today",
    ),
    "F01": (
        "tests/server/test_images.py::test_f01_f06_nothing_is_fetched_and_no_path_is_opened",
        "tests/vision/test_data_url.py::test_f01_f06_urls_are_refused_without_looking",
        "tests/models/nvila/test_nvila_serving.py::test_f01_f06_a_video_is_never_fetched",
        "tests/server/test_images.py::test_f01_a_video_is_not_fetched",
    ),
    "F06": (
        "tests/server/test_images.py::test_f01_f06_nothing_is_fetched_and_no_path_is_opened",
        "tests/vision/test_data_url.py::test_f01_f06_urls_are_refused_without_looking",
        "tests/models/nvila/test_nvila_serving.py::test_f01_f06_a_video_is_never_fetched",
        "tests/vision/test_video.py::test_f06_a_reader_opens_nothing_but_the_bytes",
    ),
    "F08": (
        "tests/vision/test_image.py::test_f08_bombs_cost_nothing_and_pil_keeps_its_guards",
        "tests/vision/test_video.py::test_f08_limits_are_told_with_both_numbers",
    ),
    "F12": (
        "tests/server/test_images.py::test_f12_text_never_claims_a_slot",
        "tests/tokenizer/test_chat.py::test_f12_a_spelt_image_is_text",
        "tests/models/nvila/test_nvila_serving.py::test_f12_text_never_claims_a_tile",
    ),
    "F14": (
        "tests/server/test_lifecycle.py::test_f14_f16_every_route_but_the_open_ones_needs_the_key",
    ),
    "F16": (
        "tests/server/test_lifecycle.py::test_f14_f16_every_route_but_the_open_ones_needs_the_key",
    ),
    "F17": ("tests/engine/test_ipc.py::test_f17_bytes_that_are_no_message_are_refused",),
    "F20": ("tests/server/test_bad_input.py::test_f20_a_megabyte_of_text_does_not_hold_health_up",),
    "F25": ("tests/models/nvila/test_nvila_serving.py::test_a01_f25_pictures_of_one_pixel",),
    "G07": (
        "tests/check/test_faulty_code.py::test_g07_key_heads_fewer_than_ranks_are_copied",
        "tests/check/test_faulty_code.py::test_g07_key_heads_that_neither_divide_nor_are_copied_are_refused",
    ),
    "G08": (
        "tests/check/test_faulty_code.py::test_g08_text_heads_that_do_not_divide_are_refused_with_what_would",
        "tests/check/test_faulty_code.py::test_g08_a_tower_whose_heads_do_not_divide_is_whole_on_every_rank",
    ),
    "H13": ("tests/cache/test_manager.py::test_h13_1000_failed_admissions_leave_nothing",),
}
