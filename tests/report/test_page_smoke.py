"""The report page works in a browser; `test_page_browser.py` tests every control."""


def test_choosing_a_model_updates_all_its_figures(open_tab, three_model_page):
    tab = open_tab(three_model_page)
    model_specific = (
        "#reliability-diagrams",
        "#confidence-histogram",
        "#class-table tbody",
        "#map-figure",
        "#sample-list",
        "#slice-table",
        "#confusion-tables",
    )
    initial_html = {selector: tab.page.inner_html(selector) for selector in model_specific}
    assert tab.count("#reliability-states input[type=radio]") == 3
    tab.page.select_option("#model", "1")
    for selector in model_specific:
        assert tab.page.inner_html(selector) != initial_html[selector], selector
    assert tab.count("#reliability-states input[type=radio]") == 2
    for section in ("#ood", "#norms", "#training"):  # this model has no such data
        assert tab.page.locator(f"{section} .missing").is_visible()
        assert not tab.page.locator(f"{section} figure").first.is_visible()
    tab.page.select_option("#model", "2")
    assert tab.count("#reliability-states input[type=radio]") == 1
    assert tab.text("#class-table tbody th").startswith("class ")  # this one has no names
    tab.page.select_option("#model", "0")
    for selector in model_specific:
        assert tab.page.inner_html(selector) == initial_html[selector], selector
