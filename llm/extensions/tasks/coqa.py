"""The documents of the task coqa of the set core."""

import datasets


def one_question_per_document(stories: datasets.Dataset) -> datasets.Dataset:
    """Return a document for each question of CoQA's stories.

    A document has the columns `story`, `earlier` (the questions before it, with their answers),
    `question` and `answer`.
    """
    documents = []
    for row in stories:
        previous_questions = ""
        answers = row["answers"]["input_text"]
        for question, answer in zip(row["questions"], answers, strict=True):
            question, answer = question.strip(), answer.strip()
            documents.append(
                {
                    "story": row["story"],
                    "earlier": previous_questions,
                    "question": question,
                    "answer": answer,
                }
            )
            previous_questions += f"Question: {question}\nAnswer: {answer}\n"
    return datasets.Dataset.from_list(documents)
